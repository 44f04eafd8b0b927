"""The HTTP endpoint of a process: its metrics, and what probes ask.

It answers in threads of its own, so that a busy event loop does not delay a probe. What it serves has no secrets and no
messages; it is not meant for the internet all the same.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from mailroom.errors import ConfigurationError
from mailroom.health import Probed
from mailroom.metrics.family import text
from mailroom.metrics.scrape import Scrape

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger("mailroom.metrics")

REQUEST_S = 10.0  # for a client to send its request, and to take the answer


class Endpoint:
    """Answers `/metrics`, `/livez`, `/readyz` and `/startupz` until it is closed.

    `address` is HOST:PORT, or :PORT for all of this machine's; port 0 takes a free one, and `port` says which. `probed`
    are the lanes or workers that the probes are about, and each scrape has the metrics of one node. Raises
    `ConfigurationError` if the address cannot be had.
    """

    def __init__(self, address: str, probed: Sequence[Probed], scrapes: Sequence[Scrape]) -> None:
        host, port = host_and_port(address)
        handler = type("_Handler", (_Handler,), {"probed": tuple(probed), "scrapes": tuple(scrapes)})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen at {address} ({error.strerror or error}). Give another --metrics HOST:PORT.",
                code="MR-metrics-address",
            ) from None
        self._scrapes = scrapes
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="mailroom-metrics", daemon=True)
        self._thread.start()
        log.info("metrics and probes at http://%s:%d", host or "*", self.port)

    def close(self) -> None:
        """Answer nothing more."""
        self._server.shutdown()
        self._server.server_close()
        for scrape in self._scrapes:
            scrape.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT, or raise `ConfigurationError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise ConfigurationError(
            f"{address!r} is not an address. Give HOST:PORT, such as 127.0.0.1:9464, or :9464 for all interfaces.",
            code="MR-metrics-address",
        )
    return host.strip("[]"), int(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what an answer failed with, unless the client has gone away."""
        if not isinstance(sys.exception(), OSError):
            log.error("an answer to a scrape or probe failed", exc_info=True)  # socketserver calls it


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version = "mailroom"
    sys_version = ""
    probed: tuple[Probed, ...]
    scrapes: tuple[Scrape, ...]

    def do_GET(self) -> None:
        answer = PATHS.get(self.path.partition("?")[0])
        if answer is None:
            self._send(404, "text/plain; charset=utf-8", f"There is {', '.join(PATHS)}.\n")
        else:
            self._send(*answer(self))

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing of a request: there are many, and they say nothing."""

    def _metrics(self) -> tuple[int, str, str]:
        found = dict(filter(None, (scrape.read() for scrape in self.scrapes)))
        if not found:
            return 503, "text/plain; charset=utf-8", "The database has not answered yet.\n"
        return 200, CONTENT_TYPE, text(found)

    def _live(self) -> tuple[int, str, str]:
        # It does not ask whether the database answers, or an outage of it would restart every process.
        return 200, "text/plain; charset=utf-8", "alive\n"

    def _ready(self) -> tuple[int, str, str]:
        return self._healths(lambda each: bool(each["ready"]))

    def _started(self) -> tuple[int, str, str]:
        return self._healths(lambda each: bool(each["has_begun"]))

    def _healths(self, is_well: Callable[[dict[str, Any]], bool]) -> tuple[int, str, str]:
        found = [asdict(each.health()) for each in self.probed]
        body = json.dumps([each | {"since": each["since"].isoformat()} for each in found])
        return (200 if all(map(is_well, found)) else 503), "application/json", body + "\n"

    def _send(self, status: int, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


PATHS: dict[str, Callable[[_Handler], tuple[int, str, str]]] = {
    "/metrics": _Handler._metrics, "/livez": _Handler._live, "/readyz": _Handler._ready, "/startupz": _Handler._started,
}  # fmt: skip
