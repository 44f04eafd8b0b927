"""The options of a NATS client that a bridge is given by its environment."""

import re
from collections.abc import Mapping
from pathlib import Path

from nats.aio.client import RawCredentials

from dispatcher.bridges.kit import known_options, tls_context
from dispatcher.bridges.nats.broker import NATS
from mailroom.errors import ConfigurationError

PLAIN = ("user", "password", "token", "tls_hostname")
TLS = ("tls_ca", "tls_cert", "tls_key")
# What nats-py looks for in a credentials file. It would look for ever in one without.
CREDENTIALS = re.compile(r"-BEGIN NATS USER JWT-+\s+\S+\s.*-BEGIN USER NKEY SEED-+\s+(\S+)\s", re.DOTALL)


def client_options(name: str, given: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments of nats-py's `connect` for these options. Raises `ConfigurationError`."""
    known_options(name, NATS, given)
    options: dict[str, object] = {option: value for option, value in given.items() if option in PLAIN}
    if "credentials" in given:
        text = _file(name, "credentials", given)
        found = CREDENTIALS.search(text)
        _check_seed(name, "credentials", found[1] if found else "")
        options["user_credentials"] = RawCredentials(text)
    if "nkey_seed_file" in given:
        options["nkeys_seed_str"] = seed = _file(name, "nkey_seed_file", given).strip()
        _check_seed(name, "nkey_seed_file", seed)
    if any(option in given for option in TLS):
        options["tls"] = tls_context(name, given)
    return options


def wants_tls(address: str, given: Mapping[str, str]) -> bool:
    """Return whether a client may only speak by TLS: by its address, or since it has an option for that."""
    return "tls://" in address or any(option.startswith("tls_") for option in given)


def _file(name: str, option: str, given: Mapping[str, str]) -> str:
    try:
        return Path(given[option]).read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"Bridge {name}: the file of {option} cannot be read: {type(error).__name__}.", code="MR-bridge-options"
        ) from None


def _check_seed(name: str, option: str, seed: str) -> None:
    try:
        import nkeys
    except ImportError as error:
        raise ConfigurationError(
            f"Bridge {name}: {option} needs the package nkeys ({error}). Run: pip install 'pg-mailroom[nats]'",
            code="MR-bridge-no-client",
        ) from None
    try:
        nkeys.from_seed(bytearray(seed.encode()))
    except Exception:  # it raises errors of many kinds, and their texts may have a part of the seed
        raise ConfigurationError(
            f"Bridge {name}: the file of {option} holds no seed of an nkey that can be used.", code="MR-bridge-options"
        ) from None
