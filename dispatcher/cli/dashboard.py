"""`mailroom dashboard`."""

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mailroom.cli.asgi import address, asgi_server, listening, stop_when_told
from mailroom.cli.call import Call, pass_call
from mailroom.cli.logs import log_to_stderr
from mailroom.cli.output import note
from mailroom.cli.parameters import WholeNumber
from mailroom.errors import ConfigurationError
from mailroom.schema.audit import person

if TYPE_CHECKING:
    from dispatcher.dashboard.access import Resolver

PORT = 8466


@click.command()
@click.option("--port", type=WholeNumber(0, 65_535), default=PORT, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--auth",
    metavar="tokens:FILE|header:NAME",
    help="Who may use it: those with a token in FILE, or whom a proxy names in this header.",
)
@click.option(
    "--proxy",
    "proxies",
    metavar="ADDRESS",
    multiple=True,
    help="With header: where the proxy is, an address or a network; repeatable. [127.0.0.1, ::1]",
)
@click.option(
    "--may",
    metavar="RIGHTS",
    default="everything",
    show_default=True,
    help="What users may do whose token does not say: everything, read-only, or some of replay, discard, requeue, "
    "pause, resume, cancel with commas between them.",
)
@click.option(
    "--name", "names", metavar="HOSTNAME", multiple=True, help="A name by which browsers reach it; repeatable."
)
@click.option("--payloads", is_flag=True, help="Show headers and values of messages.")
@pass_call
def dashboard(
    call: Call,
    port: int,
    host: str,
    auth: str | None,
    proxies: tuple[str, ...],
    may: str,
    names: tuple[str, ...],
    payloads: bool,
) -> None:
    """Show a node in a browser, and act on it there. Runs until SIGTERM or Ctrl-C.

    It has what is in trouble first, then inboxes, parked keys, dead letters, the path of a message, routes, workers,
    links, the doctor's findings and the audit. Users with the right replay, discard, requeue, pause, resume and cancel,
    each with a reason; the audit has the user.

    Without --auth only this machine reaches it, and every visitor acts as you. Beyond this machine --auth is needed.
    Each line of a file of tokens is NAME RIGHTS TOKEN. With a header the proxy has to authenticate users, set the
    header, and remove it from what it is sent. HTTPS is the proxy's business, too.

    Its sessions read only, for at most 2 s a statement, but for the one of an act. Its role needs the grant auditor,
    and operator to act. Needs pip install 'pg-mailroom[dashboard]'.

    \b
    Examples:
      mailroom dashboard
      mailroom dashboard --port 9000 --may read-only
      mailroom dashboard --host 0.0.0.0 --name ops.example.org --auth tokens:/etc/mailroom/tokens
      mailroom dashboard --host 10.0.0.7 --auth header:X-Forwarded-User --proxy 10.0.0.5 --may replay,requeue
    """
    try:
        from dispatcher.dashboard.asgi import app as asgi_app
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"`mailroom dashboard` needs {error.name}. Run: pip install 'pg-mailroom[dashboard]'",
            code="MR-command-unavailable",
        ) from None
    who = resolver(auth, host, proxies, may)
    hosts = _names(host, names)
    made: Any = asgi_app(call.dsn(), auth=who, schema=call.schema, hosts=hosts, payloads=payloads)
    with call.connection("dashboard"):
        pass  # what is wrong with the call is an error, and no page
    server = asgi_server(made, "dashboard", "dashboard")
    with listening(host, port, "MR-dashboard-address") as listener:
        log_to_stderr(call.log_format)
        if call.log_format != "json":
            note(f"The dashboard is at http://{address(listener)}/ until SIGTERM or Ctrl-C.")
        stop_when_told(server)
        try:
            server.run([listener])
        finally:
            made.state.sessions.close()


def resolver(auth: str | None, host: str, proxies: tuple[str, ...], may: str) -> "Resolver":
    """Return who may use it. Raises `ConfigurationError` for an address that others reach, unless something says so."""
    from dispatcher.dashboard.access import Local, ProxyHeader, Tokens, User, rights

    kind, _, of = (auth or "").partition(":")
    if proxies and kind != "header":
        raise click.UsageError("--proxy says whom to believe the header of --auth header:NAME: give that too.")
    if auth is None:
        if not is_loopback(host):
            raise ConfigurationError(
                f"At {host} others reach the dashboard: say who may use it, by --auth tokens:FILE or --auth "
                "header:NAME. See: mailroom dashboard --help",
                code="MR-dashboard-access",
            )
        return Local(User(person(), rights(may)))
    if kind == "tokens" and of:
        return Tokens(Path(of))
    if kind == "header" and of:
        return ProxyHeader(of, proxies or ("127.0.0.1", "::1"), rights(may))
    raise click.UsageError("--auth is tokens:FILE or header:NAME.")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens at this address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _names(host: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return by which names it may be asked for. Raises `ConfigurationError` where none is known."""
    if is_loopback(host):
        return names
    try:
        is_one = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_one = bool(host)
    if not is_one and not names:
        raise ConfigurationError(
            "At all addresses of this machine it has no name: give each by which browsers reach it, --name "
            "ops.example.org.",
            code="MR-dashboard-access",
        )
    return (*names, f"[{host}]" if ":" in host else host) if is_one else names
