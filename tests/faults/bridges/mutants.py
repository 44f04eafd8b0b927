"""Negative controls: rules of bridges broken in the campaign's own daemons, to see that the checker notices."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from confluent_kafka import Consumer, Producer, TopicPartition

from mailroom.sql.operation import Sql

Points: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]  # by node: a statement or a call, and how to strike there


@dataclass(frozen=True, slots=True)
class Aim:
    """What to do most of the time: strike at these `points`, or make the `fault` of this name."""

    points: Points = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken rule, and how to look for it."""

    broken: str
    apply: Callable[[], None]
    aim: Aim


MUTANTS: dict[str, Mutant] = {}
ACKNOWLEDGE = "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE"
COMMITTING = "kafka commit_transaction"
GIVEN_UP_MS = "2000"
# Faults of the broker's striker, by name.
CUT_BACK, FORGOTTEN = "log cut back", "answers of a queue lost that forgets"
REPEATED, SLOWLY, BY_HAND = "repeated to a new reader", "handed over slowly", "position set by hand"


def apply(name: str) -> None:
    """Break the rule in this process."""
    MUTANTS[name].apply()


def _mutant(broken: str, aim: Aim) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(work: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[work.__name__.strip("_").replace("_", "-")] = Mutant(broken, work, aim)
        return work

    return add


def _rewrite(sql: Sql, old: str, new: str) -> None:
    if old not in sql.template:
        raise AssertionError(f"the mutant no longer applies: no {old!r} in {sql.template!r}")
    sql.template = sql.template.replace(old, new)


def _replace(owner: Any, name: str, value: object) -> None:
    getattr(owner, name)  # it is there
    setattr(owner, name, value)


BETWEEN_COMMITS = Aim({"out": ((COMMITTING, "killed behind it"),)})


@_mutant("the mark is not read when a publisher begins", BETWEEN_COMMITS)
def _mark_not_read() -> None:
    from dispatcher.bridges.kafka.publisher import KafkaPublisher

    _replace(KafkaPublisher, "_read_mark", lambda self: 0)


@_mutant("Kafka's transaction does not commit the mark", BETWEEN_COMMITS)
def _mark_not_committed() -> None:
    from dispatcher.bridges.kafka import publisher

    class Forgetful(Producer):
        def send_offsets_to_transaction(self, *_: Any) -> None:
            pass

    _replace(publisher, "Producer", Forgetful)


@_mutant(
    "rows are acknowledged before the broker has acknowledged them",
    Aim({"out": ((ACKNOWLEDGE, "killed behind it"), ("kafka poll", "killed before it"))}),
)
def _acknowledged_before_published() -> None:
    from dispatcher.bridges.publishing import Publishing

    publish, acknowledge = Publishing._publish, Publishing._acknowledge

    async def later(self: Any, *work: Any) -> None:
        self.put_off = work

    async def first(self: Any, *row: Any) -> None:
        await acknowledge(self, *row)
        if work := self.__dict__.pop("put_off", None):
            await publish(self, *work)

    _replace(Publishing, "_publish", later)
    _replace(Publishing, "_acknowledge", first)


@_mutant("records are given up while the broker is away", Aim(fault=SLOWLY))
def _finite_delivery_timeout() -> None:
    from dispatcher.bridges.kafka import publisher

    class Impatient(Producer):
        def __init__(self, options: dict[str, Any], **others: Any) -> None:
            if options.pop("enable.gapless.guarantee", None):
                options["message.timeout.ms"] = GIVEN_UP_MS
            super().__init__(options, **others)

    _replace(publisher, "Producer", Impatient)


@_mutant("a repeat goes to any partition", Aim(fault=REPEATED))
def _partition_drawn_anew() -> None:
    from dispatcher.bridges.kafka import publisher

    _replace(publisher, "partitioner", lambda bridge, name: lambda record: random.randrange(record.parts))


@_mutant("the marks of what is taken in are not stored", Aim(fault=REPEATED))
def _marks_not_stored() -> None:
    from mailroom.bridges.into import NOTE

    _rewrite(NOTE, "\nON CONFLICT", "\nWHERE false ON CONFLICT")


@_mutant("a position is moved wherever it is by now", Aim(fault=BY_HAND))
def _position_not_compared() -> None:
    from mailroom.bridges.into import MOVE

    _rewrite(MOVE, " AND p.next = t.before", "")


@_mutant(
    "a bridge reads from where Kafka would",
    Aim({"into": (("kafka commit", "killed before it"), ("kafka commit", "its own server killed behind it"))}),
)
def _sought_by_kafka() -> None:
    from dispatcher.bridges.kafka import source

    class Resetting(Consumer):
        def __init__(self, options: dict[str, Any], **others: Any) -> None:
            super().__init__({**options, "auto.offset.reset": "earliest"}, **others)

    _replace(source, "Consumer", Resetting)
    _replace(source, "_assigned", lambda position: TopicPartition(position.topic, position.part))


@_mutant("a log that was cut back is read on", Aim(fault=CUT_BACK))
def _cut_log_read_on() -> None:
    from dispatcher.bridges import taking

    _replace(taking, "digest", lambda record: "as it was")


@_mutant("what was sent to a queue is not noted before", Aim(fault=FORGOTTEN))
def _sent_not_noted() -> None:
    from dispatcher.bridges.nats.publisher import NatsPublisher

    look = NatsPublisher._look

    async def forgetful(self: Any, info: Any, **_: Any) -> None:
        await look(self, info, is_known=False)

    _replace(NatsPublisher, "_look", forgetful)
