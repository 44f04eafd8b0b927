"""What became of the source's history: single decisions, and a model of both sides that are put back at random.

The model has a source with an outbox and one reader. Either is put back to a copy of itself, at any time and in any
order, and what the source had not stamped then is stamped again, in whatever order. Then nothing was taken twice,
nothing that the source has is missing, and what is reported is exactly what the target alone has. Or the target has
stopped and says why.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest

from mailroom.links.handshake.history import Claim, Renewal, is_in_doubt, renewed
from mailroom.links.handshake.identity import jumped
from tests.models import link_history
from tests.models.link_history import (
    Cut,
    HistoryStep,
    Standing,
    Witness,
    anchor,
    cut,
    lost,
    missing,
    reconciled,
    standing,
    step,
    taken,
)

BEGIN = datetime(2026, 11, 23, tzinfo=UTC)
SEEDS, PARTS = 2_000, 4


def at(number: int) -> UUID:
    return UUID(int=number)


def witness(number: int, stamped: int = 0) -> Witness:
    return Witness(at(number), BEGIN + timedelta(seconds=stamped))


# -- Single decisions -------------------------------------------------------------------------------------------------


def test_position_agrees_only_with_a_row_of_its_id_and_time() -> None:
    assert standing(5, witness(5), 1, witness(5)) is Standing.AGREES
    assert standing(5, witness(5), 5, witness(5)) is Standing.AGREES
    assert standing(5, witness(5), 1, witness(6)) is Standing.DIVERGED
    assert standing(5, witness(5), 1, witness(5, stamped=1)) is Standing.DIVERGED
    assert standing(5, witness(5), 1, None) is Standing.DIVERGED
    assert standing(5, witness(5), None, None) is Standing.DIVERGED


def test_position_below_the_oldest_row_is_a_gap() -> None:
    assert standing(5, witness(5), 8, None) is Standing.GAP
    assert list(missing(5, 8)) == [6, 7]
    assert standing(0, None, 2, None) is Standing.GAP
    assert list(missing(0, 2)) == [1]


def test_reader_without_a_position_agrees_with_what_begins_at_one() -> None:
    assert standing(0, None, None, None) is Standing.AGREES
    assert standing(0, None, 1, None) is Standing.AGREES


def test_reader_goes_on_claims_stops_or_reconciles() -> None:
    assert step(None, 3, Standing.AGREES) is HistoryStep.READ
    assert step(3, 3, Standing.AGREES) is HistoryStep.READ
    assert step(3, 3, Standing.DIVERGED) is HistoryStep.CLAIM
    assert step(3, 3, Standing.GAP) is HistoryStep.STOP
    for stands in Standing:
        assert step(3, 4, stands) is HistoryStep.RECONCILE


def test_link_is_in_doubt_until_its_reader_has_matched_in_this_life() -> None:
    assert is_in_doubt(None, at(1))
    assert is_in_doubt(at(2), at(1))
    assert not is_in_doubt(at(1), at(1))


def test_claim_of_a_link_in_doubt_makes_a_new_incarnation_beyond_all_claims() -> None:
    claims = [(Claim(5, 100), True), (Claim(9, 900), False)]
    assert renewed(2, 50, claims) == Renewal(3, 901)
    assert renewed(2, 5_000, claims) == Renewal(3, 5_001)


def test_claim_of_a_link_that_is_not_in_doubt_waits_for_somebody() -> None:
    claims = [(Claim(5, 100), False)]
    assert renewed(2, 50, claims) is None
    assert renewed(2, 50, []) is None
    assert renewed(2, 50, claims, restored=True) == Renewal(3, 101)
    assert renewed(2, 50, [], restored=True, above=7) == Renewal(8, 51)


def test_anchor_is_the_last_witness_that_both_have() -> None:
    receipts = [(3, witness(3)), (6, witness(6)), (9, witness(9))]
    rows = {3: witness(3), 6: witness(6), 9: witness(9, stamped=1)}
    assert anchor(receipts, rows, from_first=False) == 6
    assert anchor(receipts, {}, from_first=True) == 0
    assert anchor(receipts, {}, from_first=False) is None


def test_reconciling_stops_at_the_first_difference() -> None:
    rows = [(nth, at(nth)) for nth in (4, 5, 60, 7)]
    received = [(nth, at(nth)) for nth in (4, 5, 6, 7)]
    theirs = [(seq, id) for seq, (_, id) in zip((4, 5, 6, 7), rows, strict=True)]
    assert reconciled(3, theirs, received, 7) == Cut(5, (at(6), at(7)), range(6, 6))
    assert reconciled(3, theirs[:1], received, 7) == Cut(4, (at(5), at(6), at(7)), range(5, 5))
    assert reconciled(3, [], received, 7).last == 3


def test_ids_that_are_no_longer_there_are_named() -> None:
    assert cut(2, [(5, at(5)), (6, at(6))], 6) == Cut(2, (at(5), at(6)), range(3, 5))
    assert cut(2, [], 6) == Cut(2, (), range(3, 7))
    assert cut(6, [(6, at(6))], 6) == Cut(6, (), range(7, 7))


def test_report_lists_what_did_not_come_again() -> None:
    assert lost([at(1), at(2), at(3)], [at(2), at(9)]) == [at(1), at(3)]
    assert taken([at(1), at(2), at(9)], [at(2), at(3)]) == [at(1), at(9)]


# -- The model --------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """The source's database: rows of one link by seq, and what waits in its outbox."""

    rows: dict[int, tuple[Witness, int]] = field(default_factory=dict)  # by seq: the witness and the clock
    outbox: list[UUID] = field(default_factory=list)
    newest: int = 0
    acked: int = 0
    clock: int = 0
    incarnation: int = 1
    life: UUID = field(default_factory=uuid4)
    matched: UUID | None = None


@dataclass
class Target:
    """The target's database. `taken` is what it put into its inboxes, in order."""

    taken: list[UUID] = field(default_factory=list)
    receipts: dict[int, tuple[Witness, int, tuple[UUID, ...] | None]] = field(default_factory=dict)  # by last seq
    known: list[UUID] = field(default_factory=list)
    incarnation: int | None = None

    @property
    def position(self) -> int:
        return max(self.receipts, default=0)

    def received(self) -> list[tuple[int, UUID]]:
        return [
            (nth, id)
            for last, (_, _, ids) in self.receipts.items()
            for nth, id in enumerate(ids or (), start=last + 1 - len(ids or ()))
        ]


class Stopped(Exception):
    """The target has stopped, and says what it can never know."""


class Model:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.source, self.target = Source(), Target()
        self.copies: list[Source | Target] = []
        self.now = 0
        self.trims = self.random.random() < 0.5
        self.recut = 0

    def step(self) -> None:
        random = self.random
        match random.choices(range(6), (5, 5, 6, 2, 1.5, 1.0))[0]:
            case 0:
                self.source.outbox += [UUID(int=random.getrandbits(128)) for _ in range(random.randint(1, 3))]
            case 1:
                self.stamp(random.randint(1, 3))
            case 2:
                self.read(random.randint(1, 4))
            case 3:
                self.copies.append(copy.deepcopy(random.choice((self.source, self.target))))
            case 4 if self.copies:
                self.put_back(copy.deepcopy(random.choice(self.copies)))
            case 5 if self.trims:
                self.trim()

    def stamp(self, count: int) -> None:
        source = self.source
        for _ in range(min(count, len(source.outbox))):
            # Mostly in order, as deliveries are: then the same message gets the same seq again.
            nth = 0 if self.random.random() < 0.7 else self.random.randrange(len(source.outbox))
            self.now += 1
            source.clock += 1
            source.newest += 1
            stamped = Witness(source.outbox.pop(nth), BEGIN + timedelta(seconds=self.now))
            source.rows[source.newest] = (stamped, source.clock)

    def put_back(self, to: Source | Target) -> None:
        if isinstance(to, Target):
            self.target = to
            return
        # The start rule, and life anew.
        to.clock = jumped(to.clock, to.clock)
        to.life = uuid4()
        self.source = to

    def trim(self) -> None:
        source, target = self.source, self.target
        source.acked = target.position if target.position in source.rows else source.acked
        for seq in [seq for seq in source.rows if seq < source.acked and self.random.random() < 0.7]:
            if seq == min(source.rows):
                del source.rows[seq]
        lasts = sorted(target.receipts)
        old = lasts[: self.random.randint(0, max(0, len(lasts) - 1))]
        for last in old:
            stamped, clock, _ = target.receipts[last]
            target.receipts[last] = (stamped, clock, None)
        for last in old[:-1]:  # the newest of the old ones stays: a witness
            del target.receipts[last]

    def read(self, count: int) -> None:
        source, target = self.source, self.target
        if target.incarnation is not None and source.incarnation < target.incarnation:
            renewal = renewed(source.incarnation, source.clock, [], restored=True, above=target.incarnation)
            assert renewal is not None
            source.incarnation, source.clock = renewal.incarnation, renewal.clock
        position = target.position
        mine = target.receipts[position][0] if position else None
        found = source.rows.get(position)
        stands = standing(position, mine, min(source.rows, default=None), found and found[0])
        match step(target.incarnation, source.incarnation, stands):
            case HistoryStep.STOP:
                raise Stopped
            case HistoryStep.CLAIM:
                self.claim()
                return
            case HistoryStep.RECONCILE:
                self.reconcile()
                return
        source.matched = source.life
        target.incarnation = source.incarnation
        batch = [source.rows[seq] for seq in range(position + 1, min(position + count, source.newest) + 1)]
        if batch:
            ids = tuple(row.id for row, _ in batch)
            target.taken += taken(ids, target.known)
            target.receipts[position + len(batch)] = (*batch[-1], ids)

    def claim(self) -> None:
        source, position = self.source, self.target.position
        claim = Claim(position, self.target.receipts[position][1])
        claims = [(claim, is_in_doubt(source.matched, source.life))]
        renewal = renewed(source.incarnation, source.clock, claims)
        if renewal is None:  # an operator says so
            renewal = renewed(source.incarnation, source.clock, claims, restored=True)
        assert renewal is not None
        assert renewal.clock > claim.clock
        source.incarnation, source.clock = renewal.incarnation, renewal.clock

    def reconcile(self) -> None:
        source, target = self.source, self.target
        received = target.received()
        from_first = min(source.rows, default=1) == 1 and min((seq for seq, _ in received), default=1) == 1
        rows = {seq: row for seq, (row, _) in source.rows.items()}
        anchored = anchor(((last, row) for last, (row, _, _) in target.receipts.items()), rows, from_first=from_first)
        if anchored is None:
            raise Stopped
        result = reconciled(anchored, ((seq, row.id) for seq, row in rows.items()), received, target.position)
        if result.unknown:
            raise Stopped
        self.recut += bool(result.known)
        target.receipts = self.cut(result.last)
        target.known += [id for id in result.known if id not in target.known]
        target.incarnation = source.incarnation

    def cut(self, position: int) -> dict[int, tuple[Witness, int, tuple[UUID, ...] | None]]:
        """The receipts up to the position; the batch that goes beyond ends there, with the source's row as its last."""
        kept = {}
        for last, (row, clock, ids) in self.target.receipts.items():
            above = last - position
            if above <= 0:
                kept[last] = (row, clock, ids)
            elif ids is not None and above < len(ids):
                kept[position] = (*self.source.rows[position], ids[:-above])
        if position:
            assert position in kept
            kept[position] = (*self.source.rows[position], kept[position][2])
        return kept

    def settle(self) -> None:
        for _ in range(20):
            self.read(100)

    def check(self) -> None:
        source, target = self.source, self.target
        assert len(set(target.taken)) == len(target.taken), "twice"
        there = {row.id for row, _ in source.rows.values()}
        assert there <= set(target.taken), "missing"
        assert target.position == source.newest
        if not self.trims:
            come_again = [row.id for row, _ in source.rows.values()]
            assert set(lost(target.known, come_again)) == set(target.taken) - there


def run_models(seeds: range) -> tuple[int, int, int]:
    """Return how many models settled, how often one was cut anew, and how many stopped."""
    settled = recut = stopped = 0
    for seed in seeds:
        model = Model(seed)
        try:
            for _ in range(40):
                model.step()
            model.settle()
            model.check()
            settled += 1
        except Stopped:
            assert model.trims, "whoever keeps everything never has to stop"
            stopped += 1
        except Exception as error:
            error.add_note(f"Model({seed})")
            raise
        recut += model.recut
    return settled, recut, stopped


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_comes_twice_and_the_lost_set_is_exact_however_both_sides_are_put_back(part: int) -> None:
    seeds = range(part, SEEDS, PARTS)
    settled, recut, stopped = run_models(seeds)
    assert settled > len(seeds) / 2
    assert recut > len(seeds) / 4
    assert stopped > 0


def standing_by_number(seq: int, mine: Witness | None, oldest: int | None, found: Witness | None) -> Standing:
    return link_history.standing(seq, found and mine, oldest, found and mine)


def reconciled_by_any_agreement(
    anchored: int, rows: Iterable[tuple[int, UUID]], received: Iterable[tuple[int, UUID]], newest: int
) -> Cut:
    mine = dict(received)
    return cut(max((seq for seq, id in rows if mine.get(seq) == id), default=anchored), mine.items(), newest)


BROKEN: dict[str, Callable[..., Any]] = {
    "standing": standing_by_number,
    "taken": lambda ids, known: list(ids),  # twins are not left out
    "reconciled": reconciled_by_any_agreement,
}


def test_models_notice_each_rule_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule, broken in BROKEN.items():
        with monkeypatch.context() as breaking:
            breaking.setitem(globals(), rule, broken)
            with pytest.raises(AssertionError, match=r"twice|missing"):
                run_models(range(SEEDS))
