"""Where a bridge posts to, and what it may do there: its address, and its options from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from dispatcher.bridges.webhook.broker import WEBHOOK
from dispatcher.bridges.webhook.url import is_loopback, webhook_url
from mailroom.bridges.environment import variables
from mailroom.bridges.publisher import OutBridge
from mailroom.errors import ConfigurationError
from outbox.webhooks.signature import secret_bytes

URL, SECRETS = "url", "secrets"
UNSIGNED, PLAIN, PRIVATE = "unsigned", "http", "private"
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    """A URL that is posted to, and the secrets that sign; `path` has `{topic}` where the topic stands."""

    scheme: str
    host: str
    port: int
    path: str = field(repr=False)
    query: str = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    may_be_private: bool

    @property
    def authority(self) -> str:
        """The header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def target(self, topic: str) -> str:
        """Return path and query for a topic, which is percent-encoded: it is one segment of the path, or a part."""
        path = self.path.replace("{topic}", quote(topic, safe=""))
        return f"{path}?{self.query}" if self.query else path


def endpoint_of(bridge: OutBridge) -> WebhookEndpoint:
    """Return where the bridge posts to. Raises `ConfigurationError`, which shows neither URL nor secrets."""
    options = bridge.options
    own = variables(bridge.name)
    all_options = WEBHOOK.options or ()
    if unknown := sorted(options.keys() - {*all_options}):
        known = ", ".join(f"{own}{option.upper()}" for option in (*all_options, "file"))
        raise _wrong(bridge, f"there is no option {', '.join(unknown)}. There are {known}.")
    parts = webhook_url(options.get(URL, bridge.settings.address), "MR-bridge-options")
    host = parts.hostname or ""
    if parts.scheme == "http" and not (is_loopback(host) or _says_yes(bridge, options, PLAIN)):
        raise _wrong(
            bridge, f"with http:// everybody on the way can read the messages. Use https://, or set {own}HTTP=yes."
        )
    secrets = tuple(filter(None, map(str.strip, options.get(SECRETS, "").split(","))))
    if not secrets and not _says_yes(bridge, options, UNSIGNED):
        raise _wrong(
            bridge,
            f"it has no secret to sign with. Set {own}SECRETS=whsec_..., which the receiver has too, or "
            f"{own}UNSIGNED=yes.",
        )
    secret_bytes(secrets)
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    return WebhookEndpoint(
        parts.scheme, host, port, parts.path or "/", parts.query, secrets, _says_yes(bridge, options, PRIVATE)
    )


def _says_yes(bridge: OutBridge, options: Mapping[str, str], option: str) -> bool:
    said = options.get(option, "no")
    if said not in ("yes", "no"):
        raise _wrong(bridge, f"{variables(bridge.name)}{option.upper()} is yes or no.")
    return said == "yes"


def _wrong(bridge: OutBridge, why: str) -> ConfigurationError:
    return ConfigurationError(f"Bridge {bridge.name}: {why}", code="MR-bridge-options")
