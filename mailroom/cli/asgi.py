"""Commands that serve HTTP until they are told to stop: by uvicorn, which an extra brings."""

import signal
import socket
from typing import TYPE_CHECKING, Any

from mailroom.errors import ConfigurationError

if TYPE_CHECKING:
    import uvicorn

STOP_S = 5  # for requests in hand, once told to stop
BACKLOG = 1_000


def asgi_server(app: Any, command: str, extra: str) -> "uvicorn.Server":
    """Return a server of `app` that does not say what it is; raises `ConfigurationError` without uvicorn."""
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise ConfigurationError(
            f"`mailroom {command}` needs uvicorn. Run: pip install 'pg-mailroom[{extra}]'",
            code="MR-command-unavailable",
        ) from None
    from mailroom.cli.connections import MOST_HEAD_BYTES, BoundedProtocol, most_connections

    return uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",  # what has to be opened is opened around the server, so that an error ends the command
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            http=BoundedProtocol,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            limit_concurrency=most_connections() + 2,  # if all are being answered
            timeout_graceful_shutdown=STOP_S,
        )
    )


def listening(host: str, port: int, code: str) -> socket.socket:
    """Listen there; raises `ConfigurationError` with this code if that fails."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except OSError as error:
        raise ConfigurationError(
            f"Cannot listen at {host}, port {port} ({error.strerror or error}). Give another --port or --host.",
            code=code,
        ) from None


def address(listener: socket.socket) -> str:
    """Return where it listens, as a URL has it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def stop_when_told(server: "uvicorn.Server") -> None:
    """End the server at SIGTERM and Ctrl-C.

    This comes before uvicorn's own handlers, and after them: uvicorn raises the signal again that has stopped it.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: setattr(server, "should_exit", True))
