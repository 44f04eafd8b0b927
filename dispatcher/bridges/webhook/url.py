"""The URL of a webhook: what it may look like, wherever it is given. Pure: no name is resolved."""

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from mailroom.bridges.record import TEMPLATE
from mailroom.errors import ConfigurationError

VISIBLE = re.compile(r"[!-~]+\Z")


def webhook_url(url: str, code: str) -> SplitResult:
    """Return the parts of the URL; in its path `{topic}` may stand for the topic.

    Raises `ConfigurationError` with that code, which never repeats the URL: its query or path may be a secret.
    """
    parts, fault = None, "it is not http://... or https://... with a host, in ASCII"
    if VISIBLE.match(url):
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # its port, or brackets
            is_url = False
        if not is_url or parts is None:
            parts = None
        elif "@" in parts.netloc:
            parts, fault = None, "it holds a user or a password"
        elif parts.fragment:
            parts, fault = None, "it has a #fragment, which is never sent"
        elif not TEMPLATE.match(parts.path or "/") or re.search("[{}]", parts.netloc + parts.query):
            parts, fault = None, "its path may have {topic}, and no other braces stand in it"
    if parts is None:
        raise ConfigurationError(f"The URL of a webhook cannot be used: {fault}.", code=code)
    return parts


def stored_url(url: str) -> None:
    """Check a URL that is stored and shown. Raises `ConfigurationError`."""
    if webhook_url(url, "MR-bridge-settings").query:
        raise ConfigurationError(
            "The URL of a webhook is stored and shown, so it has no ?query: give the whole URL to the dispatcher by "
            "its environment (MAILROOM_BRIDGE_<NAME>_URL).",
            code="MR-bridge-settings",
        )


def is_loopback(host: str) -> bool:
    """Return whether a host as the URL has it is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
