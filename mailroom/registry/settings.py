"""The settings of an inbox: each is declared here once, with its type, bounds, default and help.

Of these come the keyword arguments of `create_inbox` and `set_inbox`, the options of `mailroom inbox create` and
`inbox set`, what is read of the tables and what lists show. A new setting needs a line here, a column in the schema
(alembic/base/05_inbox.sql), and the place that goes by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_type_hints

from mailroom.errors import ConfigurationError
from mailroom.schema.audit import differences
from mailroom.values.names import MAX_COUNT, shown
from mailroom.values.numbers import TEN_YEARS_S, seconds, whole

MOST_DAYS = 366  # a partition each
MOST_PER_S = 1_000_000
MOST_SLOTS = 10_000
FAILURE = ("park", "skip")


def _one_of(words: tuple[str, ...], given: object, what: str) -> None:
    if given not in words:
        raise ConfigurationError(
            f"{what} is {shown(given)}; give {' or '.join(map(repr, words))}.", code="MR-invalid-argument"
        )


def _separator(given: object, what: str) -> None:
    if given != "" and not (isinstance(given, str) and len(given) == 1 and "!" <= given <= "~"):
        raise ConfigurationError(
            f"{what} must be one printable character of ASCII, and no space: what ends a key's prefix, such "
            f"as '/'. Or it is '', for one breaker of the whole inbox. It cannot be {shown(given)}.",
            code="MR-invalid-argument",
        )


def _whole(least: int, most: int) -> Callable[[Any, str], object]:
    return partial(whole, least=least, most=most, error=ConfigurationError)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting. `none` is what ends it, if it can be ended; `default` is what a new inbox has.

    `column` is its SQL, of the tables r (inbox_registry) and l (limits), and `type` the type of that. `check` is given
    the value and the setting's name, and raises `ConfigurationError`. `help` is that of its option, and `bounds` are
    the values or the least and most number that the option takes.
    """

    help: str
    column: str
    type: str
    check: Callable[[Any, str], object]
    bounds: tuple[Any, ...] = ()
    metavar: str | None = None
    default: Any = None
    none: Any = None


class InboxSettings(TypedDict, total=False):
    """Settings of an inbox as they are given: one that is left out, or None, stays as it is."""

    backoff_s: Annotated[
        float | None,
        Setting(
            "Wait after a key's first failure; each further one doubles it. [1]",
            "r.backoff_s", "float8", partial(seconds, most=TEN_YEARS_S, zero=True), (0, TEN_YEARS_S), "S", 1.0,
        ),
    ]  # fmt: skip
    backoff_max_s: Annotated[
        float | None,
        Setting(
            "The longest wait. [3600]",
            "r.backoff_max_s", "float8", partial(seconds, most=TEN_YEARS_S, zero=True), (0, TEN_YEARS_S), "S",
            3600.0,
        ),
    ]  # fmt: skip
    max_attempts: Annotated[
        int | None,
        Setting(
            "How often a message is tried. [16]",
            "r.max_attempts::bigint", "bigint", _whole(1, MAX_COUNT), (1, MAX_COUNT), "N", 16,
        ),
    ]  # fmt: skip
    on_failure: Annotated[
        Literal["park", "skip"] | None,
        Setting(
            "After the last attempt park the key, which holds its later messages in order, or skip the message. [park]",
            "r.on_failure", "text", partial(_one_of, FAILURE), FAILURE, default="park",
        ),
    ]  # fmt: skip
    expire_s: Annotated[
        float | None,
        Setting(
            "Remove messages that wait for longer, such as replies that come too late; 0 ends it. [never]",
            "r.expire_s", "float8", partial(seconds, most=TEN_YEARS_S, zero=True), (0, TEN_YEARS_S), "S", none=0,
        ),
    ]  # fmt: skip
    keep_reaped_days: Annotated[
        int | None,
        Setting(
            "Keep what is reaped for this many days, to be found and replayed (mailroom archive); 0 ends it. "
            "[not kept]",
            "r.keep_reaped_days::bigint", "bigint", _whole(0, MOST_DAYS), (0, MOST_DAYS), "DAYS", none=0,
        ),
    ]  # fmt: skip
    rate: Annotated[
        float | None,
        Setting(
            "How many messages a second all its workers together handle at most; 0 ends the limit. [no limit]",
            "l.rate_per_s", "float8", partial(seconds, most=MOST_PER_S, zero=True, of="messages per second"),
            (0, MOST_PER_S), "N", none=0,
        ),
    ]  # fmt: skip
    burst: Annotated[
        int | None,
        Setting(
            "With --rate: how many they may take at once after a quiet time. [as many as in a second]",
            "CASE WHEN l.rate_per_s IS NOT NULL THEN l.burst END::bigint", "bigint", _whole(1, MOST_PER_S),
            (1, MOST_PER_S), "N",
        ),
    ]  # fmt: skip
    concurrency: Annotated[
        int | None,
        Setting(
            "How many batches all its workers have in hand at most; 0 ends the limit. [no limit]",
            "l.concurrency::bigint", "bigint", _whole(0, MOST_SLOTS), (0, MOST_SLOTS), "N", none=0,
        ),
    ]  # fmt: skip
    breaker: Annotated[
        int | None,
        Setting(
            "Stop its workers while this share of attempts fails, and try one message from time to time; 0 for no "
            "breaker. [no breaker]",
            "l.breaker_percent::bigint", "bigint", _whole(0, 100), (0, 100), "PERCENT", none=0,
        ),
    ]  # fmt: skip
    breaker_by: Annotated[
        str | None,
        Setting(
            "Have --breaker stop only the keys whose prefix fails, which is what stands before the first such "
            "character; empty for one breaker of the whole inbox. [the whole inbox]",
            "l.breaker_by", "text", _separator, metavar="CHARACTER", none="",
        ),
    ]  # fmt: skip


def _declared() -> dict[str, Setting]:
    hints = get_type_hints(InboxSettings, include_extras=True)
    return {name: cast("Setting", get_args(hint)[1]) for name, hint in hints.items()}


SETTINGS: dict[str, Setting] = _declared()
DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}


def given_settings(given: InboxSettings) -> dict[str, Any]:
    """Return the settings that are given; raise for a value that one cannot have, and for a name that there is none."""
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in given if name not in SETTINGS]:
        raise TypeError(f"An inbox has no setting {unknown[0]!r}: it has {', '.join(SETTINGS)}.")
    for name, value in settings.items():
        SETTINGS[name].check(value, name)
    first, longest = settings.get("backoff_s"), settings.get("backoff_max_s")
    if first is not None and longest is not None and longest < first:
        raise ConfigurationError(
            "backoff_max_s, the longest wait, is shorter than backoff_s, the first wait.", code="MR-invalid-argument"
        )
    for name, of in (("burst", "rate"), ("breaker_by", "breaker")):
        if settings.get(name) and not settings.get(of):
            raise ConfigurationError(f"{name} goes with a {of}: give both.", code="MR-invalid-argument")
    return settings


def held(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return given settings as an inbox has them: one that ends is None."""
    return {name: None if value == SETTINGS[name].none else value for name, value in given.items()}


def with_backoff(given: dict[str, Any], before: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Return the settings with both waits where one is given: the other one is adjusted to it."""
    first, longest = given.get("backoff_s"), given.get("backoff_max_s")
    if first is None and longest is None:
        return given
    return given | {
        "backoff_s": min(before["backoff_s"], longest) if first is None else first,
        "backoff_max_s": max(before["backoff_max_s"], first) if longest is None else longest,
    }


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return which of the settings that `after` has are different, such as `rate 5 -> 10, burst none -> 20`."""
    return differences(before, {name: after[name] for name in SETTINGS if name in after})
