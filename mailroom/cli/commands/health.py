"""`mailroom health`."""

import json
import time
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, table
from mailroom.cli.parameters import seconds
from mailroom.cli.serving import METRICS_VARIABLE
from mailroom.errors import MailroomError
from mailroom.metrics.endpoint import host_and_port

WITHIN_S = 5.0  # for one answer
AGAIN_S = 0.25


@click.command()
@click.option(
    "--metrics", "address", metavar="HOST:PORT", envvar=METRICS_VARIABLE, default="127.0.0.1:9464", show_default=True,
    help="Where the process answers: what it was given as --metrics.",
)  # fmt: skip
@click.option(
    "--started", is_flag=True, help="Ask whether it has begun to work, and not whether it is ready: for startup probes."
)
@click.option(
    "--within-s", type=seconds, default=0.0, show_default=True, help="Ask until it is, for this many seconds at most."
)
@pass_call
def health(call: Call, address: str, started: bool, within_s: float) -> None:
    """Ask a process of this machine whether it is ready: a dispatcher, an executor or workers with --metrics.

    For probes of containers that have no curl. It asks the process and not the database. Exits with 1 if the process is
    not ready, or does not answer.

    \b
    Examples:
      mailroom health
      mailroom health --metrics 127.0.0.1:9464 --started
      mailroom health --within-s 60
      mailroom health --json | jq .
    """
    host, port = host_and_port(address)
    deadline = time.monotonic() + within_s
    while True:
        try:
            status, body = _asked(host or "127.0.0.1", port, "/startupz" if started else "/readyz")
        except MailroomError:
            if time.monotonic() >= deadline:
                raise
        else:
            if status == HTTPStatus.OK or time.monotonic() >= deadline:
                break
        time.sleep(AGAIN_S)
    found = json.loads(body)
    if call.json:
        document(found)
    else:
        rows = [[each["name"], each["state"], each["ready"], each["why"]] for each in found]
        table(["name", "state", "ready", "why"], rows)
    if status != HTTPStatus.OK:
        raise SystemExit(1)


def _asked(host: str, port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection(host, port, timeout=WITHIN_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, HTTPException) as error:
        raise MailroomError(
            f"No process answers at {host}:{port} ({type(error).__name__}). Was the process started with --metrics?",
            code="MR-health-no-answer",
        ) from None
    finally:
        connection.close()
