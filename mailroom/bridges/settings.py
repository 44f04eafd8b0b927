"""The settings of a bridge, as the node keeps them. What is secret is not among them: see `environment`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from mailroom.bridges.arrival import Intake
from mailroom.bridges.broker import Broker, OwnSetting, Start, broker_of
from mailroom.bridges.record import Form
from mailroom.errors import ConfigurationError
from mailroom.names import MAX_COUNT, shown
from mailroom.numbers import whole

OnFailure: TypeAlias = Literal["stop", "skip"]

FIELDS = ("format", "encode", "tombstones")


def _check_own(broker: Broker, settings: Sequence[OwnSetting], own: Mapping[str, str]) -> None:
    """Check the settings that only this broker has."""
    known = {each.name: each for each in settings}
    for name, text in own.items():
        if name not in known:
            raise ConfigurationError(
                f"{broker.sentence} has no setting {shown(name)}: leave it out.", code="MR-bridge-settings"
            )
        if not isinstance(text, str):
            raise ConfigurationError(f"The setting {name} is no text.", code="MR-bridge-settings")
        known[name].check(text)


@dataclass(frozen=True, slots=True)
class OutSettings:
    """How a bridge publishes: to which `broker`, at which `address`, and in which `form`.

    With `exactly_once` the broker keeps, in each of its transactions, a mark of what was published; `mark_topic` is the
    topic at the broker under which it keeps that. `on_failure` says what happens with a message that the broker
    refuses or that the form cannot hold: `stop`, so that nothing is published before somebody acts, or `skip`, so that
    it goes to `dead_letter`. `own` are the settings that only this broker has, by their names. Raises
    `ConfigurationError`; but not for what a node has kept (`is_kept`), whose broker may not be installed here.
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
        if self.mark_topic is None:
            raise ConfigurationError(
                "With exactly_once the broker keeps a mark beside the records, under one topic that exists there. This "
                "bridge publishes to several topics: name one of them (--mark-topic).",
                code="MR-bridge-settings",
            )

    def text(self) -> str:
        """Return the settings as the database keeps them."""
        form = {name: getattr(self.form, name) for name in FIELDS}
        return json.dumps(
            {
                "broker": self.broker, "address": self.address, "topic": self.form.topic, **form,
                "exactly_once": self.exactly_once, "mark_topic": self.mark_topic, "on_failure": self.on_failure,
                "own": dict(self.own),
            }
        )  # fmt: skip

    @classmethod
    def of(cls, text: str) -> "OutSettings":
        """Read what `text` returned."""
        kept: Mapping[str, Any] = json.loads(text)
        form = Form(kept["topic"], **{name: kept[name] for name in FIELDS})
        return cls(
            kept["broker"], kept["address"], form, kept["exactly_once"], kept["mark_topic"], kept["on_failure"],
            kept["own"], is_kept=True,
        )  # fmt: skip


MAX_ORIGINS = 1_000  # unless somebody says otherwise: whoever writes to the topic can make them up
INTAKE = ("as_topic", "key", "decode")


@dataclass(frozen=True, slots=True)
class InSettings:
    """How a bridge takes in: from which `topics` of which `broker`, at which `address`, and how by `intake`.

    `start` says where it begins in a log of which it has read nothing yet: with the `earliest` record there, or with
    what comes from now on (`latest`). `on_failure` says what happens with a record that is no message: it goes to
    `dead_letter` (`skip`), or nothing is taken in before somebody acts (`stop`). It knows at most `max_origins` links
    of nodes that publish there; a record of one more is no message. `own` are the settings that only this broker has.
    Raises `ConfigurationError`, as `OutSettings` does.
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

    def text(self) -> str:
        """Return the settings as the database keeps them."""
        intake = {name: getattr(self.intake, name) for name in INTAKE}
        return json.dumps(
            {
                "broker": self.broker, "address": self.address, "topics": list(self.topics), **intake,
                "start": self.start, "on_failure": self.on_failure, "max_origins": self.max_origins,
                "own": dict(self.own),
            }
        )  # fmt: skip

    @classmethod
    def of(cls, text: str) -> "InSettings":
        """Read what `text` returned."""
        kept: Mapping[str, Any] = json.loads(text)
        intake = Intake(**{name: kept[name] for name in INTAKE})
        return cls(
            kept["broker"], kept["address"], tuple(kept["topics"]), intake, kept["start"], kept["on_failure"],
            kept["max_origins"], kept["own"], is_kept=True,
        )  # fmt: skip
