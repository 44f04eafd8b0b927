"""The total-order protocol, simulated: whatever crashes, joins and is excluded, the order is one and nothing is stuck.

MAILROOM_ORDER_SEEDS says how many worlds are tried (20,000 take some ten seconds), MAILROOM_ORDER_FIRST with which seed
to begin. A failure names its seed: `World(SEED).run(STEPS)` repeats it.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.links import order_world
from tests.links.order_world import Violation, World
from tests.models.total_order import Mark, Route, answered, is_stopped, routed, shown

SEEDS = int(os.environ.get("MAILROOM_ORDER_SEEDS", "20000"))
FIRST = int(os.environ.get("MAILROOM_ORDER_FIRST", "0"))
STEPS, PARTS = 120, 4


def run_worlds(seeds: range) -> None:
    for seed in seeds:
        try:
            World(seed).run(STEPS)
        except Exception as error:
            error.add_note(f"World({seed}).run({STEPS})")
            raise


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_order_is_one_and_nothing_is_stuck_in_all_worlds(part: int) -> None:
    run_worlds(range(FIRST + part, FIRST + SEEDS, PARTS))


@pytest.mark.slow
def test_worlds_have_all_that_the_protocol_has_to_stand() -> None:
    """A simulation proves nothing of what never happens in it."""
    worlds = []
    for seed in range(1_000):
        world = World(seed)
        world.run(STEPS)
        worlds.append(world)
    nodes = [node for world in worlds for node in world.nodes]
    assert {len(world.nodes) for world in worlds} == {2, 3, 4}
    assert {world.is_ring for world in worlds} == {True, False}
    assert sum(len(world.whole()) > 1 for world in worlds) > 100
    assert sum(len(world.sending) < len(world.nodes) for world in worlds) > 100
    assert sum(len(node.given) for node in nodes) > 20_000
    assert sum(node.undone for node in nodes) > 500
    assert sum(node.has_joined for node in nodes) > 100
    assert sum(node.has_excluded and not node.excluded for node in nodes) > 100
    assert sum(len(node.dead) for node in nodes) > 100


def bound_as_maximum(clock: int, shown: Iterable[int]) -> int:
    return max(shown, default=clock)


def shown_whatever_was_joined(received: int, since: Iterable[int]) -> int:
    return received or 2**62


def shown_by_the_latest_join(received: int, since: Iterable[int]) -> int:
    return max(received, *since)


def answered_below_the_clock(clock: int, wanted: int, last: int) -> Mark | None:
    return Mark(wanted, durable=True) if wanted > last else None


def answered_before_it_is_durable(clock: int, wanted: int, last: int) -> Mark | None:
    return Mark(max(clock, wanted), durable=False) if wanted > last else None


def late_into_the_inbox(sent_clock: int, since: int, stable: int) -> Route:
    return Route.UNWANTED if sent_clock <= since else Route.INBOX


BROKEN: list[tuple[str, Callable[..., Any]]] = [
    ("bound", bound_as_maximum),
    ("raised", lambda stable, bound: bound),  # what is stable falls
    ("shown", shown_whatever_was_joined),
    ("shown", shown_by_the_latest_join),
    ("answered", answered_below_the_clock),
    ("answered", answered_before_it_is_durable),
    ("has_joined", lambda received, since: True),  # a topic is asked for before the clock
    ("routed", late_into_the_inbox),
]


def test_worlds_notice_each_rule_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule, broken in BROKEN:
        with monkeypatch.context() as breaking:
            breaking.setattr(order_world, rule, broken)
            with pytest.raises(Violation):
                run_worlds(range(1_000))


def test_origin_has_shown_an_inbox_no_more_than_the_least_of_its_subscriptions_leaves_out() -> None:
    """A second topic, joined later, does not vouch for the first."""
    assert shown(5, [0, 100]) == 5
    assert shown(5, [100]) == 100
    assert shown(120, [100]) == 120


def test_message_is_taken_only_behind_its_subscription_and_behind_what_is_stable() -> None:
    assert routed(7, since=7, stable=0) is Route.UNWANTED
    assert routed(8, since=7, stable=8) is Route.DEAD_LETTER
    assert routed(9, since=7, stable=8) is Route.INBOX


def test_mark_is_durable_and_no_lower_than_the_source_s_clock() -> None:
    assert answered(10, wanted=7, last=3) == Mark(10, durable=True)
    assert answered(10, wanted=12, last=3) == Mark(12, durable=True)
    assert answered(10, wanted=3, last=3) is None


def test_total_inboxes_of_a_new_incarnation_stand_until_they_are_resumed() -> None:
    assert is_stopped(incarnation=2, resumed=1)
    assert not is_stopped(incarnation=2, resumed=2)
