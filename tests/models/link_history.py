"""The model of what a target does about its source's history: is its position still there, and what is done if not.

A link's rows are numbered (seq), and each row has a witness: the message's id and when it was stamped. Two executions
of stamp never share both, and each had one past. So if both sides have the same witness at a seq, they have the same
rows up to it. If the source lost rows that the target has, the target claims them, and the source takes a new
incarnation (`mailroom.links.handshake.history`). Then the target finds out what both have (`reconciled`): what it alone
has becomes known, and is never taken twice.

| here | what decides the same |
|---|---|
| `standing`, `missing` | `dispatcher.links.at_source.bounds.bounding` |
| `step` | `dispatcher.links.visit` |
| `anchor`, `reconciled` | `dispatcher.links.reconcile`; `tests/links/test_diverged.py` compares |
| `cut` | `KNOW`, `CUT` and `finding_unknown` of `mailroom.links.handshake.diverged` |
| `lost` | `LOST` of `mailroom.links.resume` |
| `taken` | `twin` of `dispatcher.links.receive.RECEIVE` |

`tests/links/test_history.py` puts both sides back at random, and shows that the rules keep their promises.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Witness:
    """What tells a row of one history from a row of another with the same seq."""

    id: UUID
    stamped_at: datetime


class Standing(Enum):
    """How the target's position stands to the source's rows."""

    AGREES = "agrees"
    DIVERGED = "diverged"
    GAP = "gap"


def standing(seq: int, mine: Witness | None, oldest: int | None, found: Witness | None) -> Standing:
    """Return how the position `seq` of the target, with the witness `mine`, stands to the source's rows.

    `oldest` is the seq of the oldest row that the source still has, None if it never had any; `found` is the witness of
    its row `seq`, None if it has no such row. A target without a position (seq 0) agrees with whatever begins at 1.
    """
    if seq == 0:
        return Standing.GAP if oldest is not None and oldest > 1 else Standing.AGREES
    if oldest is not None and seq < oldest:
        return Standing.GAP
    return Standing.AGREES if found is not None and found == mine else Standing.DIVERGED


def missing(seq: int, oldest: int) -> range:
    """Return the seqs that a target at position `seq` can never read, since the source's oldest row is `oldest`."""
    return range(seq + 1, oldest)


class HistoryStep(Enum):
    """What the target does after a hello."""

    READ = "read"
    CLAIM = "claim"
    RECONCILE = "reconcile"
    STOP = "stop"


def step(pinned: int | None, told: int, stands: Standing) -> HistoryStep:
    """Return what a target does that has read incarnation `pinned` (None for none yet), and is told `told`.

    READ: go on. CLAIM: write the claim at the source, and read nothing. RECONCILE: see `reconciled`. STOP: rows are
    missing for good, and only `mailroom link resume` helps. A lower incarnation never comes so far (see `refusal`).
    """
    if pinned is not None and told > pinned:
        return HistoryStep.RECONCILE
    return {Standing.AGREES: HistoryStep.READ, Standing.DIVERGED: HistoryStep.CLAIM, Standing.GAP: HistoryStep.STOP}[
        stands
    ]


# -- At the target ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """What a target that finds a new incarnation does, in one transaction.

    Its receipts are cut to the position `last`, with the source's row there as the last of them (none if `last` is 0).
    `known` are the ids that it received above: messages of a lost history, left out whenever they come again. `unknown`
    are the seqs above of which the target no longer has the ids: what they were may come twice.
    """

    last: int
    known: tuple[UUID, ...]
    unknown: range = range(0)


def anchor(receipts: Iterable[tuple[int, Witness]], rows: Mapping[int, Witness], *, from_first: bool) -> int | None:
    """Return the last seq at which both sides have the same witness: up to there they have one history.

    `receipts` are the target's: last seq and its witness. `rows` are the source's by seq. None if there is no such seq
    within what both have kept; 0 if nevertheless both begin with seq 1 (`from_first`).
    """
    return max((last for last, witness in receipts if rows.get(last) == witness), default=0 if from_first else None)


def reconciled(
    anchored: int, rows: Iterable[tuple[int, UUID]], received: Iterable[tuple[int, UUID]], newest: int
) -> Cut:
    """Return what a target keeps of its position, given the last seq `anchored` of which it is certain.

    `rows` are the source's and `received` the target's (seq, id) above it; `newest` is the target's position. From
    `anchored` on they are compared one by one: what has the same seq and id is the same message, even if it was stamped
    again. The first difference, or the end of either side, ends what both have.
    """
    theirs, mine = dict(rows), dict(received)
    last = anchored
    while last + 1 in mine and theirs.get(last + 1) == mine[last + 1]:
        last += 1
    return cut(last, mine.items(), newest)


def cut(last: int, received: Iterable[tuple[int, UUID]], newest: int) -> Cut:
    """Return what becomes of a target's receipts if it goes on after `last`: also `link resume --at SEQ`.

    `received` are the (seq, id) that it still has, `newest` its position.
    """
    above = sorted((seq, id) for seq, id in received if seq > last)
    first_id = above[0][0] if above else newest + 1
    return Cut(last, tuple(id for _, id in above), range(last + 1, first_id))


def lost(known: Iterable[UUID], come_again: Iterable[UUID]) -> list[UUID]:
    """Return the ids that only the target has, in their order: what `mailroom link report` lists.

    `known` are the ids received from lost histories, `come_again` what the source has stamped for the link since.
    """
    again = set(come_again)
    return [id for id in known if id not in again]


def taken(ids: Sequence[UUID], known: Iterable[UUID]) -> list[UUID]:
    """Return which messages of a batch are received: those that were not received from a lost history."""
    twins = set(known)
    return [id for id in ids if id not in twins]
