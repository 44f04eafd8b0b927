"""The checker of the campaign of links notices each kind of corrupted ledger; and its mutants still apply."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest

from tests.faults.links.checks import ORDER, PLAIN, RING, TOTAL, Checker, Handled, Ledger, Sent

EAST, WEST = UUID(int=1), UUID(int=2)
Ledgers = dict[str, Ledger]


def number(nth: int) -> UUID:
    return UUID(int=100 + nth)


def round_of(first: int = 1) -> Ledgers:
    """East sends three messages to west, which answers the second; and each sends one in order, west an answer."""
    one, two, three, answer, mine, reply = (number(first + nth) for nth in range(6))
    clock = 10 * first
    sent = [Sent(id, RING, "k", first + nth) for nth, id in enumerate((one, two, three))]
    in_order = [
        Handled(TOTAL, mine, EAST, "o", clock + 4, clock + 4),
        Handled(TOTAL, reply, WEST, "w", clock + 20, clock + 9),
    ]
    return {
        "east": Ledger(
            EAST,
            [*sent, Sent(mine, ORDER, "o", first + 9)],
            [Handled(PLAIN, answer, WEST, "on", clock + 19, clock + 8), *in_order],
        ),
        "west": Ledger(
            WEST,
            [Sent(answer, RING, "on", first, cause=two), Sent(reply, ORDER, "w", first, cause=mine)],
            [
                *(Handled(PLAIN, each.id, EAST, "k", clock + 5 + n, clock + 1 + n) for n, each in enumerate(sent)),
                replace(in_order[0], clock=clock + 8),
                replace(in_order[1], clock=clock + 9),
            ],
        ),
    }


def found(*rounds: Ledgers) -> list[str]:
    checker = Checker({"east": "west", "west": "east"})
    return [violation for ledgers in rounds for violation in checker.check(ledgers)]


def test_sound_rounds_violate_nothing() -> None:
    assert found(round_of(1), round_of(7)) == []


def changed(ledgers: Ledgers, name: str, handled: Callable[[list[Handled]], list[Handled]]) -> Ledgers:
    own = ledgers[name]
    return ledgers | {name: replace(own, handled=handled(list(own.handled)))}


def swapped(rows: list[Handled], one: int, other: int) -> list[Handled]:
    rows[one], rows[other] = rows[other], rows[one]
    return rows


def put(rows: list[Handled], nth: int, **fields: object) -> list[Handled]:
    rows[nth] = replace(rows[nth], **fields)  # type: ignore[arg-type]  # of any field
    return rows


CORRUPTIONS: list[tuple[str, Callable[[list[Handled]], list[Handled]], str]] = [
    ("west", lambda rows: rows[1:], "1 lost"),
    ("west", lambda rows: [*rows[:3], *rows[4:]], "1 lost"),
    ("west", lambda rows: [*rows[:3], rows[2], *rows[3:]], "handled twice"),
    ("west", lambda rows: [*rows, rows[-1]], "handled twice"),
    ("west", lambda rows: put(rows, 0, id=number(50)), "nobody sent"),
    ("west", lambda rows: put(rows, 2, origin=WEST), "another origin"),
    ("west", lambda rows: put(rows, 3, origin=WEST), "another origin"),
    ("west", lambda rows: put(rows, 2, sent_clock=17), "effects before their causes"),
    ("east", lambda rows: put(rows, 1, clock=13), "effects before their causes"),
    ("west", lambda rows: swapped(rows, 0, 1), "inversion in key"),
    ("west", lambda rows: put(put(rows, 0, clock=16), 1, clock=15), "against its clock"),
    ("west", lambda rows: put(rows, 1, clock=15), "inversion of the origin"),
    ("west", lambda rows: put(rows, 1, sent_clock=11), "inversion of the origin"),
    ("west", lambda rows: swapped(rows, 3, 4), "inversion of the total order"),
    ("west", lambda rows: swapped(rows, 3, 4), "handled the total order differently"),
    ("west", lambda rows: swapped(rows, 3, 4), "handled before their question"),
    ("east", lambda rows: put(rows, 0, sent_clock=16), "stamped before their question"),
    ("east", lambda rows: put(rows, 0, clock=16), "handled at a clock before"),
]


def test_corrupted_ledger_is_noticed() -> None:
    seen = [(told, found(changed(round_of(), name, change))) for name, change, told in CORRUPTIONS]
    assert [(told, said) for told, said in seen if not any(told in each for each in said)] == []


def test_a_message_again_in_a_later_round_is_noticed() -> None:
    first, second = round_of(1), round_of(7)
    again = changed(second, "west", lambda rows: [*first["west"].handled[2:3], *rows])
    assert any("nobody sent" in each for each in found(first, again))


def test_order_holds_from_one_round_to_the_next() -> None:
    said = "; ".join(found(round_of(7), round_of(1)))
    for told in ("inversion in key", "between rounds", "inversion of the total order"):
        assert told in said


@pytest.mark.slow
def test_mutants_apply() -> None:
    program = "from tests.faults.links.mutants import MUTANTS, apply\nfor name in MUTANTS: apply(name)"
    subprocess.run([sys.executable, "-c", program], check=True)
