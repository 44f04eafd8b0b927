"""A periodic message as it is declared: what is sent, and at which times."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TypeAlias, get_args

from mailroom.errors import InvalidMessage
from mailroom.message.headers import as_json, given
from mailroom.sql.operation import Row
from mailroom.values import codec
from mailroom.values.cron import cron
from mailroom.values.names import Key, key_text, periodic_name, shown, topic_name
from mailroom.values.numbers import seconds

Missed: TypeAlias = Literal["skip", "once", "all"]

MAX_JITTER_S = 3_600.0
# The headers that each message gets when it is sent: which periodic message it is of, and when it was due.
PERIODIC, DUE = "periodic", "due"


@dataclass(frozen=True, slots=True)
class PeriodicMessage:
    """A message that is sent at the times of a cron expression, under a name that is unique in its node.

    `cron` has five fields: minute, hour, day of the month, month, day of the week, such as `30 7 * * mon-fri`; or it is
    `@hourly`, `@daily`, `@weekly`, `@monthly` or `@yearly`. Its times are those of `time_zone`, a name such as
    Europe/Paris. `topic`, `value`, `key` and `headers` are as for `Outbox.send`; without a key each message has one of
    its own. `kind` is M message, E event or C command.

    `missed` says what is sent for times that passed more than a minute ago, since no dispatcher ran: `skip` nothing,
    `once` one message, for the last of them, `all` each of them, in order. `jitter_s` delays each send by 0 to so many
    seconds, at most 3,600; by how many depends on the name and the time alone.

    Each message has the headers `periodic`, this name, and `due`, the time in ISO 8601. Its id is computed from the
    node, the name and the time.

    Raises `InvalidMessage` or `InvalidName`. A `Topic` makes one of a typed value: `Topic.periodic`.
    """

    name: str
    cron: str
    topic: str
    value: object = field(default=None, repr=False)  # kept out of repr, which ends up in logs
    key: Key | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    kind: Literal["M", "E", "C"] = "M"
    time_zone: str = "UTC"
    missed: Missed = "once"
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        """Check it where it is declared, and not only where a program starts."""
        columns(self)


def columns(message: PeriodicMessage) -> Row:
    """Return the values of its columns, in the order of the fields. Raises `InvalidMessage` or `InvalidName`."""
    periodic_name(message.name)
    cron(message.cron, message.time_zone)
    for found, allowed, what in ((message.kind, ("M", "E", "C"), "kind"), (message.missed, get_args(Missed), "missed")):
        if not isinstance(found, str) or found not in allowed:
            raise InvalidMessage(f"{what} {shown(found)} is none of {', '.join(allowed)}.", code="MR-invalid-argument")
    headers = given(message.headers)
    # Also the size of what is added when it is sent, so that it fits then.
    as_json(headers | {PERIODIC: message.name, DUE: datetime.max.replace(tzinfo=UTC).isoformat()})
    return (
        message.name,
        message.cron,
        topic_name(message.topic),
        codec.encode(message.value),
        None if message.key is None else key_text(message.key),
        as_json(headers),
        message.kind,
        message.time_zone,
        message.missed,
        float(seconds(message.jitter_s, "jitter_s", MAX_JITTER_S, zero=True, error=InvalidMessage)),
    )
