"""Runs the transactions in which batches of other nodes are received: the ceiling, and messages that are refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest
from uuid import UUID

import psycopg

from dispatcher.delivery.dead import tell_of_dead
from dispatcher.delivery.fan_out import fan_out
from dispatcher.delivery.sift import reason_of
from dispatcher.links.at_source.bounds import Position
from dispatcher.links.at_source.fetch import FetchedBatch
from dispatcher.links.receive import Reception, receiving
from dispatcher.links.refusal import finding_refused
from mailroom.errors import MailroomError
from mailroom.links.start import starting
from mailroom.order import sequences
from mailroom.order.clock import MAX_ADVANCED, raising_ceiling
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run_in_transaction
from mailroom.sql.sqlstate import Meaning, meaning


class LinkStopped(MailroomError):
    """Nothing more can be received from an origin before an operator has acted; the text says why."""


@dataclass(frozen=True, slots=True)
class Taking:
    """What belongs to a batch that is taken in from a broker.

    For each row its `senders`, None for a foreign one, and its `reasons`, if it cannot be decoded. `moving` is given
    how many of the rows are received, and moves the position at the broker past them, in the same transaction. So
    does `opening` before them record that the broker is read, if trouble may be recorded: it would bar them.
    """

    senders: Sequence[UUID | None]
    reasons: Sequence[str | None]
    moving: Callable[[int], Operation[None]]
    opening: Callable[[], Operation[None]] | None = None


class _Fewer(Exception):  # no error either
    """Undo the transaction: fewer rows would be received, and the position at the broker was to move further."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class _Barred(Exception):  # no error: it goes no further than the transaction
    """Undo the transaction: the database refuses the `nth` row of the batch, and a total inbox wants it."""

    def __init__(self, nth: int) -> None:
        self.nth = nth


@dataclass(slots=True)
class _Part:
    """How many rows of a batch are tried after failures on data; and why the database refuses some of them."""

    rows: int
    reasons: list[str | None]
    failures: int = 0


class Receiver:
    """Receives over an autocommit connection of its own, with `RECEIVING_SESSION`; one transaction per batch.

    All origins share it, one batch after another. A transaction meets at most that many `partitions`, None for what the
    server has room for.
    """

    def __init__(self, connection: psycopg.AsyncConnection, schema: str, *, partitions: int | None = None) -> None:
        self._connection = connection
        self._schema = schema
        self._partitions = partitions
        self._recovered = False
        self._has_logs = False

    async def receive(
        self,
        origin: int,
        batch: FetchedBatch,
        position: Position,
        *,
        now: datetime | None = None,
        taking: Taking | None = None,
    ) -> Reception:
        """Receive a batch that begins right after `position`, or the first rows of it; with `taking`, from a broker.

        Only the messages that the database refuses go to `dead_letter`. Go on from the position returned. Raises
        `LinkStopped` if the next row cannot be received, and with it nothing of this origin.
        """
        if not self._recovered:
            # As a dispatcher does before its first delivery: a crash may have set the sequence back.
            sequences.tell((await self._transaction(starting(self._schema))).raised)
            self._recovered = True
        part = _Part(batch.rows, [] if taking is None else list(taking.reasons))
        while True:
            operation = receiving(
                self._schema, origin, batch, position, most=part.rows, reasons=part.reasons, now=now,
                partitions=self._partitions, senders=None if taking is None else taking.senders,
                has_logs=self._has_logs,
            )  # fmt: skip
            try:
                reception = await self._transaction(_whole(operation, part.rows, taking))
            except _Fewer as fewer:
                part.rows = fewer.rows
            except _Barred as barred:
                if barred.nth == 1:
                    why = _barred(position.seq + 1, part.reasons[0])
                    raise LinkStopped(why, code="MR-link-row-refused") from None
                part.rows = barred.nth - 1
            except psycopg.Error as error:
                if meaning(error) is not Meaning.DATA:
                    raise
                await self._narrow(part, error, finding_refused(self._schema, origin, batch, most=part.rows, now=now))
            else:
                self._has_logs = reception.has_logs
                done = await self._done(reception, position, ["receive", "order"] if taking is None else ["take in"])
                if done is not None:
                    return done

    async def _narrow(self, part: "_Part", error: psycopg.Error, finding: Operation[list[str | None]]) -> None:
        """Find what the database refuses by itself, or else have fewer rows received."""
        part.failures += 1
        if part.failures == 1:
            found = await self._transaction(finding)
            part.reasons = [known or new for known, new in zip_longest(part.reasons, found)]
        elif part.rows == 1:
            if part.reasons[0] is not None:
                raise error
            diag = error.diag
            part.reasons[0] = reason_of(error.sqlstate or "", diag.constraint_name, diag.table_name, diag.column_name)
        elif part.failures > 2:
            # No row is refused by itself: halve the batch down to one, as `Deliverer` does, and as late.
            part.rows = max(1, part.rows // 2)

    async def _done(self, reception: Reception, position: Position, stages: list[str]) -> Reception | None:
        """Return what was received, with what follows from it; None if it is to be tried again."""
        if reception.ceiling is not None:
            await self._transaction(raising_ceiling(self._schema, reception.ceiling))
            return None
        if reception.outcome == "hole":
            raise LinkStopped(f"Rows after {position.seq} are missing at the source.", code="MR-link-rows-missing")
        if reception.outcome == "clock":
            raise LinkStopped(_too_high(position.seq + 1, reception.clock or 0), code="MR-link-clock-too-high")
        if reception.outcome == "waits":
            await fan_out(self._connection, self._schema, self._partitions)
            return None
        await tell_of_dead(self._connection, self._schema, stages, reception.dead)
        if not reception.waits:
            return reception
        done = await fan_out(self._connection, self._schema, self._partitions)
        await tell_of_dead(self._connection, self._schema, ["deliver"], done.dead)
        return replace(
            reception, delivered=reception.delivered + done.copies, dead=reception.dead + done.dead,
            woken=reception.woken + done.woken, inboxes=[*reception.inboxes, *done.inboxes],
        )  # fmt: skip

    async def _transaction(self, operation: Operation[T]) -> T:
        return await run_in_transaction(self._connection, operation)


def _whole(receiving: Operation[Reception], most: int, taking: Taking | None) -> Operation[Reception]:
    """Receive, and move the position at the broker, or undo both."""
    if taking is not None and taking.opening is not None:
        yield from taking.opening()
    reception = yield from receiving
    if reception.barred is not None:
        raise _Barred(reception.barred)
    if taking is not None and reception.outcome == "taken":
        if reception.rows < most:
            raise _Fewer(reception.rows)
        yield from taking.moving(reception.rows)
    return reception


def _barred(seq: int, reason: str | None) -> str:
    return (
        f"The database refuses message {seq} ({reason}), which an inbox in total order wants. Such an inbox may lack "
        "nothing: make the database take it."
    )


def _too_high(seq: int, clock: int) -> str:
    told = f"Row {seq} has a clock above all that this node takes now, {clock}. "
    if clock > MAX_ADVANCED:
        return told + "No node counts that far by itself: start the source over in a new schema."
    return told + f"No node counts that far by itself. To follow the source there: mailroom node advance {clock}"
