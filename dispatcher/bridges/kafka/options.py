"""The options of librdkafka that a bridge is given by its environment, and those that are Mailroom's own."""

import re
from collections.abc import Mapping

from mailroom.errors import ConfigurationError

# What the guarantees rest on.
# D-bridges-9: `message.timeout.ms=0` and `enable.gapless.guarantee`.
OURS = frozenset(
    {
        "bootstrap.servers", "enable.idempotence", "acks", "request.required.acks", "message.timeout.ms",
        "delivery.timeout.ms", "enable.gapless.guarantee", "transactional.id", "group.id", "group.instance.id",
        "enable.auto.commit", "auto.offset.reset", "isolation.level", "enable.partition.eof",
        "delivery.report.only.error",
    }
)  # fmt: skip
SECRET = re.compile(r"password|secret|token|(^|\.)key(\.pem)?$")


def client_options(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the options as librdkafka names them: `sasl_password` is sasl.password, and `log__level` log_level.

    Raises `ConfigurationError`.
    """
    options = {option.replace("_", ".").replace("..", "_"): value for option, value in given.items()}
    if ours := sorted(OURS & options.keys()):
        raise ConfigurationError(
            f"Bridge {name}: {', '.join(ours)} cannot be set, since the guarantees of a bridge rest on it.",
            code="MR-bridge-options",
        )
    return options


def hiding(options: Mapping[str, object], text: str) -> str:
    """Return a text of the client without what is secret of its options."""
    for option, value in options.items():
        if SECRET.search(option) and isinstance(value, str) and value:
            text = text.replace(value, "***")
    return text
