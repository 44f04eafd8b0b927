"""Who is who: what a dispatcher does at its start, and which hellos are refused with which command."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from mailroom.links.handshake.identity import JUMP, Noted, Party, Pinned, Place, common_wire, jumped, refusal, start
from mailroom.order.clock import MAX_CLOCK, ClockOverflow

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=1)
HERE, THERE = Place(1, 10, 3, NOON), Place(2, 20, 1, NOON)
SOURCE, READER = Party("paris", uuid4(), HERE), Party("rome", uuid4(), THERE)
# What both sides have noted in earlier hellos.
NOTED = Noted(HERE, 4, READER.id, THERE.system_id, THERE.database_oid, link=7, reader_origin=5)
PINNED = Pinned(SOURCE.id, 4, HERE.system_id, HERE.timeline, link=7, origin=5)


# -- The start --------------------------------------------------------------------------------------------------------


def test_same_place_changes_nothing() -> None:
    found = start(HERE, HERE)
    assert (found.jumps, found.moved, found.note) == (False, False, HERE)


def test_other_start_or_timeline_jumps() -> None:
    for found in (replace(HERE, started_at=LATER), replace(HERE, timeline=4), replace(HERE, timeline=2)):
        begun = start(HERE, found)
        assert (begun.jumps, begun.moved, begun.note) == (True, False, found)


def test_nothing_noted_jumps() -> None:
    assert start(None, HERE).jumps
    assert not start(None, HERE).moved
    assert start(None, HERE).note == HERE


def test_moved_node_jumps_at_each_start_and_stays_moved_until_somebody_says_so() -> None:
    for found in (replace(HERE, system_id=9), replace(HERE, database_oid=9)):
        first = start(HERE, found)
        assert (first.jumps, first.moved) == (True, True)
        again = start(first.note, found)
        assert (again.jumps, again.moved) == (True, True)
        assert not start(found, found).moved


def test_jump_goes_beyond_the_clock_and_the_ceiling() -> None:
    assert jumped(100, 1_000_000) == 1_000_000 + 2**32
    assert jumped(1_000_000, 100) == 1_000_000 + JUMP
    assert jumped(MAX_CLOCK - JUMP, 0) == MAX_CLOCK
    with pytest.raises(ClockOverflow):
        jumped(MAX_CLOCK - JUMP + 1, 0)


# -- Hello ------------------------------------------------------------------------------------------------------------


def test_those_who_know_each_other_go_on() -> None:
    assert refusal(SOURCE, READER, NOTED, PINNED) is None


def test_first_hello_goes_on() -> None:
    assert refusal(SOURCE, READER, Noted(HERE, 1, link=1), Pinned(origin=1)) is None


REFUSED = {
    "encoding of the source": (replace(SOURCE, encoding="LATIN1"), READER, NOTED, PINNED, "paris", "createdb"),
    "encoding of the reader": (SOURCE, replace(READER, encoding="SQL_ASCII"), NOTED, PINNED, "rome", "createdb"),
    "no common wire": (SOURCE, replace(READER, wires=(2, 3)), NOTED, PINNED, "paris", "mailroom migrate"),
    "reader's wire is old": (replace(SOURCE, wires=(2, 3)), READER, NOTED, PINNED, "rome", "mailroom migrate"),
    "one id": (SOURCE, replace(READER, id=SOURCE.id), NOTED, PINNED, "the copy", "mailroom node new-id"),
    "one id at the first hello": (
        *(SOURCE, replace(READER, id=SOURCE.id), Noted(HERE, 1), Pinned()),
        *("the copy", "mailroom node new-id"),
    ),
    "another source": (replace(SOURCE, id=uuid4()), READER, NOTED, PINNED, "rome", "mailroom link add paris"),
    "another reader": (SOURCE, replace(READER, id=uuid4()), NOTED, PINNED, "paris", "mailroom link moved rome"),
    "source on another server": (
        *(replace(SOURCE, place=replace(HERE, system_id=9)), READER, NOTED, PINNED),
        *("paris", "mailroom node moved, or for a copy mailroom node new-id"),
    ),
    "source in another database": (
        *(replace(SOURCE, place=replace(HERE, database_oid=9)), READER, NOTED, PINNED),
        *("paris", "mailroom node moved, or for a copy mailroom node new-id"),
    ),
    "reader on another server": (
        *(SOURCE, replace(READER, place=replace(THERE, system_id=9)), NOTED, PINNED),
        *("paris", "mailroom link moved rome"),
    ),
    "reader in another database": (
        *(SOURCE, replace(READER, place=replace(THERE, database_oid=9)), NOTED, PINNED),
        *("paris", "mailroom link moved rome"),
    ),
    "lower timeline": (
        *(replace(SOURCE, place=replace(HERE, timeline=2)), READER, NOTED, PINNED),
        *("rome", "mailroom link moved paris"),
    ),
    "lower incarnation": (
        *(SOURCE, READER, replace(NOTED, incarnation=3), PINNED),
        *("paris", "mailroom node restored --above 4"),
    ),
}


def test_hello_is_refused_in_one_line_that_names_the_command() -> None:
    wrong = []
    for case, (source, reader, noted, pinned, at, command) in REFUSED.items():
        found = refusal(source, reader, noted, pinned)
        if found is None or found.at != at or command not in found.command:
            wrong.append((case, found))
            continue
        line = str(found)
        assert line.endswith(f"; at {at}: {found.command}")
        assert "\n" not in line
        assert "paris" in found.reason or "rome" in found.reason
    assert wrong == []


def test_link_put_back_or_forgotten_is_refused() -> None:
    for noted, pinned in ((replace(NOTED, link=6), PINNED), (NOTED, replace(PINNED, origin=6))):
        found = refusal(SOURCE, READER, noted, pinned)
        assert found is not None
        assert (found.at, found.command) == ("paris", "mailroom link remove rome, then mailroom link allow rome")


def test_higher_timeline_and_incarnation_go_on() -> None:
    promoted = replace(SOURCE, place=replace(HERE, timeline=4))
    assert refusal(promoted, READER, replace(NOTED, incarnation=5), PINNED) is None


def test_timelines_of_two_servers_are_not_compared() -> None:
    """A dump begins at timeline 1; that it is the same node was said at the source, by `node moved`."""
    moved = Place(9, 90, 1, LATER)
    assert refusal(replace(SOURCE, place=moved), READER, replace(NOTED, place=moved), PINNED) is None


def test_timeline_and_server_start_of_the_reader_are_its_own_matter() -> None:
    later = replace(READER, place=replace(THERE, timeline=8, started_at=LATER))
    assert refusal(SOURCE, later, NOTED, PINNED) is None


def test_who_somebody_is_comes_before_where() -> None:
    found = refusal(SOURCE, Party("rome", SOURCE.id, replace(HERE, database_oid=11)), NOTED, PINNED)
    assert found is not None
    assert found.command == "mailroom node new-id"


def test_wire_is_the_highest_that_both_speak() -> None:
    sides = [((1, 1), (1, 1)), ((1, 3), (2, 5)), ((2, 5), (1, 3)), ((1, 2), (1, 1)), ((1, 1), (2, 2)), ((3, 4), (1, 2))]
    assert [common_wire(source, reader) for source, reader in sides] == [1, 3, 3, 1, None, None]


def test_ids_are_told_in_full() -> None:
    other = UUID(int=7)
    assert str(other) in str(refusal(replace(SOURCE, id=other), READER, NOTED, PINNED))
