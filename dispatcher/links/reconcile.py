"""Reconcile: a target that hears of a newer incarnation of its source finds out what both have, and goes on from there.

It reads at both ends in small portions, and holds no transaction at one end while it waits for the other. Only the last
step writes, in one transaction at the target, if nothing was received there meanwhile.
"""

from dataclasses import dataclass

import psycopg

from mailroom.links.handshake.diverged import (
    Ending,
    Newest,
    finding_anchor,
    finding_unknown,
    reading_ending,
    reading_ends,
    reading_extent,
    reading_newest,
    reading_received,
    reading_sent,
    rewinding,
)
from mailroom.links.handshake.target import stopping
from mailroom.sql.runner import run_async, run_in_transaction

ENDS = 1_000  # receipts compared at once
COMPARED_ROWS = 10_000  # messages compared at once
AGAIN = 3  # times, if something moved meanwhile


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Where a target goes on. `known` counts the messages that only it has. `why`: it stopped instead, and why.

    `unknown` are the seqs of which it no longer has the ids: their messages may come again.
    """

    last: int
    known: int = 0
    unknown: range = range(0)
    why: str | None = None


async def reconcile(
    target: psycopg.AsyncConnection,
    schema: str,
    origin: int,
    source: psycopg.AsyncConnection,
    source_schema: str,
    link: int,
    incarnation: int,
) -> Reconciled | None:
    """Bring the receipts of `origin` in line with the source's new incarnation; both connections are in autocommit.

    If it cannot be known what both have, the origin is stopped, and `why` names the command that helps. Returns None if
    the origin is gone or something moved at either end: greet the source again.
    """
    for _ in range(AGAIN):
        seen = await run_async(target, reading_newest(schema, origin))
        if seen is None:
            return None
        ends = _Ends(target, schema, origin, source, source_schema, link)
        anchor = await ends.anchor(seen)
        if anchor is None:
            return await ends.stop(seen, 0, range(1, seen.last + 1), incarnation)
        last = await ends.compared(anchor)
        if unknown := await run_async(target, finding_unknown(schema, origin, last)):
            return await ends.stop(seen, last, unknown, incarnation)
        ending: Ending | None = None
        if last:
            ending = await run_async(source, reading_ending(source_schema, link, last))
            if ending is None:  # trimmed since
                continue
        known = await run_in_transaction(target, rewinding(schema, origin, seen, incarnation, ending))
        if known is not None:
            return Reconciled(last, known)
    return None


@dataclass(frozen=True, slots=True)
class _Ends:
    """Both ends of a link, and what is asked of them."""

    target: psycopg.AsyncConnection
    schema: str
    origin: int
    source: psycopg.AsyncConnection
    source_schema: str
    link: int

    async def anchor(self, seen: Newest) -> int | None:
        """Return the last seq for which both have the same row, None if nothing shows one; 0 if both have all rows."""
        below = seen.last + 1
        while ends := await run_async(self.target, reading_ends(self.schema, self.origin, below, ENDS)):
            found = await run_async(self.source, finding_anchor(self.source_schema, self.link, ends))
            if found is not None:
                return found
            below = ends[-1][0]
        extent = await run_async(self.source, reading_extent(self.source_schema, self.link))
        return 0 if not seen.last or extent is None or extent[0] == 1 else None

    async def compared(self, last: int) -> int:
        """Return the last seq up to which both have the same messages, given one up to which they have."""
        while True:
            mine = await run_async(self.target, reading_received(self.schema, self.origin, last, COMPARED_ROWS))
            theirs = await run_async(self.source, reading_sent(self.source_schema, self.link, last, COMPARED_ROWS))
            same = last
            for here, there in zip(mine, theirs, strict=False):
                if here != there or here[0] != same + 1:
                    return same
                same += 1
            if same < last + COMPARED_ROWS:
                return same
            last = same

    async def stop(self, seen: Newest, last: int, unknown: range, incarnation: int) -> Reconciled:
        """Record at the target why nothing more is read."""
        extent = await run_async(self.source, reading_extent(self.source_schema, self.link))
        has = "no rows" if extent is None else f"rows {extent[0]} to {extent[1]}"
        why = (
            f"{seen.name} has lost history (incarnation {incarnation}, it has {has}), and of rows {unknown[0]} to "
            f"{unknown[-1]}, received before, it is not known whether it still has them: say after which row to go "
            f"on: mailroom link resume {seen.name} --at ROW"
        )
        await run_in_transaction(self.target, stopping(self.schema, self.origin, why))
        return Reconciled(last, 0, unknown, why)
