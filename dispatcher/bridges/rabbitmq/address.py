"""The address of RabbitMQ: which servers it names, wherever it is given. Pure: no name is resolved."""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from mailroom.errors import ConfigurationError

SERVER = re.compile(
    r"(?:(?P<scheme>amqps?)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(?::(?P<port>\d{1,5}))?"
    r"(?:/(?P<vhost>[^/?#@\s]*))?\Z"
)
PORTS = {"amqp": 5672, "amqps": 5671}


@dataclass(frozen=True, slots=True)
class AmqpServer:
    """One server, and the virtual host there."""

    scheme: str
    host: str
    port: int
    vhost: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}, virtual host {self.vhost}"


def amqp_servers(address: str) -> list[AmqpServer]:
    """Return the servers of an address, `[amqp[s]://]HOST[:PORT][/VHOST]` and commas between several of them.

    Raises `ConfigurationError`, which never repeats the address.
    """
    return [_server(each) for each in address.split(",")]


def _server(text: str) -> AmqpServer:
    found = SERVER.match(text)
    scheme = (found and found["scheme"]) or "amqp"
    port = int((found and found["port"]) or PORTS[scheme])
    if found is None or not 0 < port < 65536:
        raise ConfigurationError(
            "RabbitMQ's address is HOST:PORT, HOST:PORT/VHOST, or such a URL with amqp:// or amqps:// before it; or "
            "several of them with commas between. It has no ?query.",
            code="MR-bridge-settings",
        )
    return AmqpServer(scheme, found["host"].strip("[]"), port, unquote(found["vhost"] or "") or "/")
