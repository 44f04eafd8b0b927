"""The settings of a bridge, as the node keeps them. What is secret is not among them: see `environment`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import Field, InitVar, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, TypeAlias, TypedDict, get_args

from mailroom.bridges.arrival import Decoding, Intake
from mailroom.bridges.broker import Broker, OwnSetting, Start, broker_of
from mailroom.bridges.record import Encoding, Form, Format
from mailroom.errors import ConfigurationError
from mailroom.registry.subscriptions import Topics
from mailroom.values.names import MAX_COUNT, shown
from mailroom.values.numbers import whole

OnFailure: TypeAlias = Literal["stop", "skip"]


class BridgeSettings(TypedDict, total=False):
    """Settings of a bridge that can change, as they are given: one that is left out, or None, stays as it is.

    A bridge out has `topic`, `format`, `encode`, `tombstones`, `topics` (which it publishes), `keep_s` and `max_rows`;
    a bridge into the node `topics` (from which it takes in at the broker), `as_topic`, `key`, `decode`, `start` and
    `max_origins`; and both have the others. Of `own` the settings that are given change, and an empty text ends one.
    """

    address: str | None
    topic: str | None
    format: Format | None
    encode: Encoding | None
    tombstones: bool | None
    topics: Topics | None
    as_topic: str | None
    key: str | None
    decode: Decoding | None
    start: Start | None
    on_failure: OnFailure | None
    max_origins: int | None
    keep_s: float | None
    max_rows: int | None
    own: Mapping[str, str] | None


class _Flat:
    """Settings of a bridge as one mapping of names to values, in which those of `form` and `intake` stand beside."""

    __slots__ = ()

    @classmethod
    def made(cls, given: Mapping[str, Any], *, is_kept: bool = False) -> Self:
        """Make them of such a mapping; what it lacks is as by default. Raises `ConfigurationError`."""
        made: dict[str, Any] = {}
        for each in _fields(cls):
            part = _part(each)
            if part is not None:
                made[each.name] = part(**{name: given[name] for name in _names(part) if name in given})
            elif each.name in given:
                value = given[each.name]
                made[each.name] = tuple(value) if isinstance(value, list) else value
        return cls(**made | {"is_kept": is_kept})

    @classmethod
    def names(cls) -> set[str]:
        """Return the names that such a mapping has."""
        parts = [(each.name, _part(each)) for each in _fields(cls)]
        return {name for own, part in parts for name in ([own] if part is None else _names(part))}

    def flat(self) -> dict[str, Any]:
        """Return such a mapping."""
        flat: dict[str, Any] = {}
        for each in _fields(type(self)):
            value = getattr(self, each.name)
            if is_dataclass(value):
                flat |= {name: getattr(value, name) for name in _names(value)}
            else:
                plain = list if isinstance(value, tuple) else dict if isinstance(value, Mapping) else None
                flat[each.name] = value if plain is None else plain(value)
        return flat

    def text(self) -> str:
        """Return the settings as the database keeps them."""
        return json.dumps(self.flat())

    @classmethod
    def of(cls, text: str) -> Self:
        """Read what `text` returned."""
        return cls.made(json.loads(text), is_kept=True)


def _part(of: Field[Any]) -> Any:
    """Return the class of a field that is itself a group of settings, None of any other."""
    return of.default_factory if is_dataclass(of.default_factory) else None


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind)


def _names(kind: Any) -> list[str]:
    return [each.name for each in _fields(kind)]


def with_given(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a bridge with those that are given; of its broker's own an empty text ends one."""
    own = {**before.get("own", {}), **given.get("own", {})}
    return {**before, **given, "own": {name: text for name, text in own.items() if text != ""}}


def _check_own(broker: Broker, settings: Sequence[OwnSetting], own: Mapping[str, str]) -> None:
    """Check the settings that only this broker has."""
    known = {each.name: each for each in settings}
    for name, text in own.items():
        if name not in known:
            raise ConfigurationError(
                f"{broker.sentence} has no setting {shown(name)}: leave it out.", code="MR-bridge-settings"
            )
        if not isinstance(text, str):
            raise ConfigurationError(f"The setting {name} is not a text.", code="MR-bridge-settings")
        known[name].check(text)


@dataclass(frozen=True, slots=True)
class OutSettings(_Flat):
    """How a bridge publishes: to which `broker`, at which `address`, and in which `form`.

    With `exactly_once` the broker keeps, in each of its transactions, a mark of what was published; `mark_topic` is the
    topic at the broker under which it keeps that, by default the one to which all is published. `on_failure` says what
    happens with a message that the broker refuses or that the form cannot hold: `stop`, so that nothing is published
    before somebody acts, or `skip`, so that it goes to `dead_letter`. `own` are the settings that only this broker has,
    by their names. Raises `ConfigurationError`; but not for what a node has kept (`is_kept`), whose broker may not be
    installed here.
    """

    broker: str
    address: str
    form: Form = field(default_factory=Form)
    exactly_once: bool = False
    mark_topic: str | None = None
    on_failure: OnFailure = "stop"
    own: Mapping[str, str] = field(default_factory=dict)
    is_kept: InitVar[bool] = False

    def __post_init__(self, is_kept: bool) -> None:
        """Check the settings against each other, and by what the broker can do."""
        if is_kept:
            return
        broker = broker_of(self.broker)
        if (to := broker.publishes) is None:
            raise ConfigurationError(f"{broker.sentence} cannot be published to.", code="MR-bridge-settings")
        broker.check_address(self.address)
        if self.on_failure not in get_args(OnFailure):
            raise ConfigurationError("on_failure is stop or skip.", code="MR-bridge-settings")
        if self.form.format not in to.formats:
            raise ConfigurationError(
                f"The format for {broker.title} is {' or '.join(to.formats)}: leave out --format.",
                code="MR-bridge-settings",
            )
        _check_own(broker, to.settings, self.own)
        self._check_exactly_once(broker, to.exactly_once)

    def _check_exactly_once(self, broker: Broker, can: str) -> None:
        if not self.exactly_once:
            return
        if can != "option":
            raise ConfigurationError(
                f"{broker.sentence} needs no exactly_once: it keeps the mark in any case. Leave it out."
                if can == "always"
                else f"{broker.sentence} is at least once, and its readers know repeats by their ids: leave out "
                "exactly_once.",
                code="MR-bridge-settings",
            )
        if self.mark_topic is None and "{topic}" not in self.form.topic:
            object.__setattr__(self, "mark_topic", self.form.topic)
        if self.mark_topic is None:
            raise ConfigurationError(
                "With exactly_once the broker keeps a mark beside the records, under one topic that exists there. This "
                "bridge publishes to several topics: name one of them (--mark-topic).",
                code="MR-bridge-settings",
            )


MAX_ORIGINS = 1_000  # unless an operator says otherwise: writers to the topic can make them up


@dataclass(frozen=True, slots=True)
class InSettings(_Flat):
    """How a bridge takes in: from which `topics` of which `broker`, at which `address`, and how by `intake`.

    `start` says where it begins in a log of which it has read nothing yet: with the `earliest` record there, or with
    what comes from now on (`latest`). `on_failure` says what happens with a record that is not a message: it goes to
    `dead_letter` (`skip`), or nothing is taken in before somebody acts (`stop`). It knows at most `max_origins` links
    of nodes that publish there; a record of one more is not a message. `own` are the settings that only this broker
    has. Raises `ConfigurationError`, as `OutSettings` does.
    """

    broker: str
    address: str
    topics: tuple[str, ...]
    intake: Intake = field(default_factory=Intake)
    start: Start = "earliest"
    on_failure: OnFailure = "skip"
    max_origins: int = MAX_ORIGINS
    own: Mapping[str, str] = field(default_factory=dict)
    is_kept: InitVar[bool] = False

    def __post_init__(self, is_kept: bool) -> None:
        """Check all, and by what the broker can do."""
        if is_kept:
            return
        broker = broker_of(self.broker)
        if (of := broker.takes_from) is None:
            raise ConfigurationError(
                broker.otherwise or f"{broker.sentence} cannot be taken in from.", code="MR-bridge-settings"
            )
        broker.check_address(self.address)
        _check_own(broker, of.settings, self.own)
        if not self.topics or not all(isinstance(topic, str) and topic for topic in self.topics):
            raise ConfigurationError("Name the topics at the broker that are taken in.", code="MR-bridge-settings")
        whole(self.max_origins, "max_origins", 1, MAX_COUNT, ConfigurationError)
        if self.start not in get_args(Start):
            raise ConfigurationError("start is earliest or latest.", code="MR-bridge-settings")
        if self.start not in of.starts:
            raise ConfigurationError(
                f"What {broker.title} has is taken in from its {of.starts[0]} record: leave out --start.",
                code="MR-bridge-settings",
            )
        if self.on_failure not in get_args(OnFailure):
            raise ConfigurationError("on_failure is stop or skip.", code="MR-bridge-settings")
