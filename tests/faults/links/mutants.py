"""Negative controls: rules of links broken in the campaign's own daemons, to see that the checker notices."""

from collections.abc import Callable
from dataclasses import dataclass

from mailroom.sql.operation import Operation, Sql
from tests.faults.links.strikes import OWN_SERVER, Aim


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken rule, and how to look for it."""

    broken: str
    apply: Callable[[], None]
    aim: Aim | None = None  # statements, and the way to strike them at which it shows


MUTANTS: dict[str, Mutant] = {}


def apply(name: str) -> None:
    """Break the rule in this process."""
    MUTANTS[name].apply()


def _mutant(broken: str, *names: str, way: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(work: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[work.__name__.strip("_").replace("_", "-")] = Mutant(broken, work, Aim(names, way) if names else None)
        return work

    return add


def _rewrite(sql: Sql, old: str, new: str) -> None:
    if old not in sql.template:
        raise AssertionError(f"the mutant no longer applies: no {old!r} in {sql.template!r}")
    sql.template = sql.template.replace(old, new)


@_mutant(
    "a batch is received wherever the newest receipt is; nor does a new leader end the session of the last one",
    "dispatcher.links.at_source.fetch.FETCH_UNDECODED", "dispatcher.delivery.deliver.DISPATCH_LOCK", way="paused",
)  # fmt: skip
def _receipt_not_compared() -> None:
    from dispatcher.links.receive import RECEIVE
    from tests.faults.role_linked import end_nothing

    behind = "WHERE %(at_seq)s::bigint > 0) THEN"
    _rewrite(RECEIVE, behind, behind.replace(" THEN", " AND false THEN"))
    end_nothing()


@_mutant("what leaves the node can be seen before it is durable", "COMMIT", way=OWN_SERVER)
def _stamp_committed_asynchronously() -> None:
    from dispatcher.delivery.deliver import DELIVER_FULL

    _rewrite(DELIVER_FULL, "set_config('synchronous_commit', 'on', true)", "''")


@_mutant(
    "what was received is acknowledged before it is durable",
    "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE",
    way=OWN_SERVER,
)
def _acknowledged_before_durable() -> None:
    from dispatcher.links import lane

    def nothing() -> Operation[None]:
        yield from ()

    setattr(lane, "making_durable", nothing)  # noqa: B010


@_mutant("received messages are numbered by the node's own clock alone")
def _numbered_without_sent_clock() -> None:
    from dispatcher.links.receive import RECEIVE

    both = "greatest((SELECT last_value FROM {schema}.clock), max(shown) OVER received)"
    _rewrite(RECEIVE, both, "(SELECT last_value FROM {schema}.clock)")


@_mutant("seq does not follow the clock")
def _seq_by_key() -> None:
    from dispatcher.delivery.deliver import DELIVER_FULL

    _rewrite(DELIVER_FULL, "PARTITION BY link ORDER BY clock", "PARTITION BY link ORDER BY key, clock DESC")


@_mutant("a total inbox is given out up to the highest clock that an origin has shown, not the lowest")
def _bound_as_maximum() -> None:
    from mailroom.order.total import RAISE

    _rewrite(RAISE, "THEN min(s.clock)", "THEN max(s.clock)")


@_mutant("what came by a link of another number is forgotten")
def _old_link_forgotten() -> None:
    from mailroom.links.handshake.target import FORGET

    _rewrite(FORGET, "unnest(gone.ids)", "unnest(gone.ids[1:0])")
