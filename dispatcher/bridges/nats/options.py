"""The options of a NATS client that a bridge is given by its environment."""

import ssl
from collections.abc import Mapping

from mailroom.errors import ConfigurationError

PLAIN = {
    "user": "user", "password": "password", "token": "token", "credentials": "user_credentials",
    "nkey_seed_file": "nkeys_seed", "tls_hostname": "tls_hostname",
}  # fmt: skip
TLS = ("tls_ca", "tls_cert", "tls_key")
SECRET = ("password", "token")


def client_options(name: str, given: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments of nats-py's `connect` for these options. Raises `ConfigurationError`."""
    known = (*PLAIN, *TLS)
    if unknown := sorted(given.keys() - set(known)):
        raise ConfigurationError(
            f"Bridge {name}: {', '.join(unknown)} cannot be set. The options for NATS are {', '.join(known)}.",
            code="MR-bridge-options",
        )
    options: dict[str, object] = {PLAIN[option]: value for option, value in given.items() if option in PLAIN}
    if any(option in given for option in TLS):
        options["tls"] = _tls(name, given)
    return options


def hiding(given: Mapping[str, str], text: str) -> str:
    """Return a text of the client without what is secret of its options."""
    for option in SECRET:
        if secret := given.get(option):
            text = text.replace(secret, "***")
    return text


def _tls(name: str, given: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=given.get("tls_ca"))
        if "tls_cert" in given:
            context.load_cert_chain(given["tls_cert"], given.get("tls_key"))
    except OSError as error:  # an SSLError, too
        raise ConfigurationError(
            f"Bridge {name}: the files of TLS (tls_ca, tls_cert, tls_key) cannot be used: {type(error).__name__}.",
            code="MR-bridge-options",
        ) from None
    return context
