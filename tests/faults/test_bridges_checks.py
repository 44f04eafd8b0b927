"""The checker of the campaign of bridges notices what is corrupted; its places are there, and its mutants apply."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from uuid import UUID

import pytest

from dispatcher import daemon
from tests.faults.bridges.checks import EXACTLY, FOREIGN, LEAST, LOGGED, STREAM, TOPICS, Checker
from tests.faults.bridges.mutants import MUTANTS
from tests.faults.bridges.strikes import CENTRAL, WORST
from tests.faults.failpoints import COMMANDS, names_of_statements
from tests.faults.links.checks import Handled, Sent
from tests.faults.role_bridged import CALLS, RECORDS

HERE = UUID(int=1)
IDS = {topic: [UUID(int=100 * number + nth) for nth in range(3)] for number, topic in enumerate(TOPICS, 1)}


class Round:
    """Three messages of a key in each topic."""

    def __init__(self) -> None:
        self.sent = [Sent(id, topic, "k", nth) for topic, ids in IDS.items() for nth, id in enumerate(ids, 1)]
        self.handled = [
            Handled(topic, id, HERE, "k", nth + 10, nth) for topic, ids in IDS.items() for nth, id in enumerate(ids, 1)
        ]
        self.log = {topic: Counter(IDS[topic]) for topic in LOGGED}

    def found(self, **known: set[UUID]) -> list[str]:
        return Checker().check(self.sent, self.handled, self.log, **known)


def test_sound_round_violates_nothing() -> None:
    assert Round().found() == []


@pytest.mark.parametrize("nth", [0, 4])
def test_lost_message_is_noticed_unless_it_is_gone_from_the_log(nth: int) -> None:
    one = Round()
    lost = one.handled.pop(nth)
    assert [f"{lost.inbox}: 1 lost, as {lost.id}"] == one.found()
    assert one.found(gone={lost.id}) == []


def test_message_that_an_operator_has_left_out_may_be_lost_and_not_taken_in() -> None:
    one = Round()
    left_out = one.handled[0].id
    assert one.found(gone={left_out}, barred={left_out}) == [f"1 taken in that an operator had left out, as {left_out}"]
    del one.handled[0]
    assert one.found(gone={left_out}, barred={left_out}) == []


def test_message_that_was_handled_twice_is_noticed() -> None:
    one = Round()
    one.handled.append(replace(one.handled[2], sent_clock=9))
    assert f"{LEAST}: 1 handled twice, as {IDS[LEAST][2]}" in one.found()


def test_message_that_nobody_sent_is_noticed_unless_its_node_was_put_back() -> None:
    one = Round()
    undone = one.sent.pop(0).id
    assert len(one.found()) == 2  # in the log, and handled
    assert one.found(undone={undone}) == []


def test_inversion_along_a_key_is_noticed() -> None:
    one = Round()
    one.handled[0], one.handled[1] = one.handled[1], one.handled[0]
    assert [each.partition(",")[0] for each in one.found()] == [
        f"inversion in key k of {LEAST}", f"key k of {LEAST} against the clock of its node",
    ]  # fmt: skip


def test_repeats_in_the_log_are_counted_at_least_once_and_noticed_at_exactly_once() -> None:
    one, checker = Round(), Checker()
    one.log[LEAST][IDS[LEAST][1]] = 3
    assert checker.check(one.sent, one.handled, one.log) == []
    assert checker.repeats == 2
    one.log[EXACTLY][IDS[EXACTLY][1]] = 2
    assert one.found() == [f"{EXACTLY}: 1 in the log more than once, as {IDS[EXACTLY][1]}"]


def test_repeat_of_an_earlier_round_is_noticed() -> None:
    one, checker = Round(), Checker()
    checker.check(one.sent, one.handled, one.log)
    late = {topic: Counter(IDS[topic][:1]) for topic in LOGGED}
    assert [each.partition(":")[0] for each in checker.check([], [], late)] == [EXACTLY, FOREIGN, STREAM]
    assert checker.repeats == 1


def test_message_that_is_not_in_the_log_is_noticed_unless_the_broker_has_lost_it() -> None:
    one = Round()
    del one.log[LEAST][IDS[LEAST][0]]
    assert one.found() == [f"{LEAST}: 1 are not in the log, as {IDS[LEAST][0]}"]
    assert one.found(gone={IDS[LEAST][0]}) == []


def test_places_that_are_struck_are_there() -> None:
    assert daemon  # it has loaded all modules
    calls = {RECORDS, *(f"kafka {call}" for _, calls in CALLS.values() for call in calls)}
    points = [*WORST.values(), *(each for mutant in MUTANTS.values() for each in mutant.aim.points.values())]
    worst = {name for each in points for name, _ in each} - set(COMMANDS)
    assert {*CENTRAL, *worst} <= {*names_of_statements().values(), *calls}


@pytest.mark.slow
def test_mutants_apply() -> None:
    program = "from tests.faults.bridges.mutants import MUTANTS, apply\nfor name in MUTANTS: apply(name)"
    subprocess.run([sys.executable, "-c", program], check=True)
