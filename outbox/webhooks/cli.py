"""`mailroom bridge serve`."""

import asyncio
import os
import re
import socket
from typing import TYPE_CHECKING

import click

from mailroom.cli.asgi import address, asgi_server, listening, stop_when_told
from mailroom.cli.call import Call, pass_call
from mailroom.cli.logs import log_to_stderr
from mailroom.cli.output import note
from mailroom.cli.parameters import NODE, PATTERN, WholeNumber
from mailroom.errors import ConfigurationError
from mailroom.values.names import MAX_VALUE_BYTES
from outbox.webhooks.app import MIB, WebhookApp

if TYPE_CHECKING:
    import uvicorn


@click.command()
@click.option("--topics", metavar="PATTERN", type=PATTERN, multiple=True, required=True, help="A topic, or a pattern.")
@click.option("--port", type=WholeNumber(0, 65_535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--name", type=NODE, default="serve", show_default=True, help="Which secrets: see above.")
@click.option("--unsigned", is_flag=True, help="Take unsigned requests: something in front authenticates senders.")
@click.option(
    "--max-bytes", type=WholeNumber(1, MAX_VALUE_BYTES), default=MIB, show_default=True, help="The largest body."
)
@click.option("--parallel", type=WholeNumber(1, 1_000), default=10, show_default=True, help="How many sessions.")
@pass_call
def serve(
    call: Call,
    topics: tuple[str, ...],
    port: int,
    host: str,
    name: str,
    unsigned: bool,
    max_bytes: int,
    parallel: int,
) -> None:
    """Take webhooks: POST /topics/TOPIC becomes a message. Runs until SIGTERM or Ctrl-C.

    Requests are signed as Standard Webhooks says. The secrets, whsec_... with commas between them, are in the
    environment: MAILROOM_BRIDGE_SERVE_SECRETS, or MAILROOM_BRIDGE_<NAME>_SECRETS with --name. A request is answered
    with 202 when its message is committed; a request that comes again with the same webhook-id sends nothing more.
    Needs pip install 'pg-mailroom[webhook]'.

    \b
    Examples:
      mailroom bridge serve --topics order.paid
      mailroom bridge serve --topics stripe.# --topics github.# --port 9000
    """
    variable = f"MAILROOM_BRIDGE_{re.sub(r'[^A-Z0-9]', '_', name.upper())}_SECRETS"
    secrets = [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
    if not secrets and not unsigned:
        raise ConfigurationError(
            f"{variable} is not set: give it the secrets whsec_... with which requests are signed, with commas between "
            "them. Or say --unsigned, if something in front of this server authenticates the senders.",
            code="MR-webhook-secret-invalid",
        )
    app = WebhookApp(
        call.dsn(),
        secrets,
        topics=topics,
        schema=call.schema,
        max_bytes=max_bytes,
        unsigned=unsigned,
        parallel=parallel,
    )
    server = asgi_server(app, "bridge serve", "webhook")
    with listening(host, port, "MR-webhook-address") as listener:
        log_to_stderr(call.log_format)
        if call.log_format != "json":
            note(f"Taking webhooks at http://{address(listener)}/topics/ until SIGTERM or Ctrl-C.")
        stop_when_told(server)
        asyncio.run(_run(app, server, listener))


async def _run(app: WebhookApp, server: "uvicorn.Server", listener: socket.socket) -> None:
    async with app:
        await server.serve([listener])
