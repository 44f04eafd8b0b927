"""Finishing: the rest of a large batch that was decided moves into the outbox, chunk after chunk, at a fair pace.

The next chunk moves when a dispatcher has taken about half of the one before. So all other messages queue behind
about a chunk, and not behind a batch of millions.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from mailroom.errors import ConnectionFailed, MailroomError
from mailroom.figures.leaders import is_dispatched
from mailroom.session.backoff import pause_s
from mailroom.session.settings import refusal
from mailroom.sql.runner import run
from mailroom.sql.sqlstate import BLAMES, is_of_row_security, meaning, sqlstate
from mailroom.values.names import shown
from outbox.bulk import CHUNK_BYTES, CHUNK_ROWS, BulkLost, MovedRows, advancing, giving_up, oldest
from spark_jobs.node import Node

ATTEMPTS = 10
LONGEST_PAUSE_S = 5.0


class BulkUnfinished(MailroomError):
    """A large batch was decided and will be sent, but not all of it is in the outbox yet. Run it again."""

    code = "MR-spark-bulk-unfinished"


@dataclass(frozen=True, slots=True)
class ChunkPace:
    """How a large batch is moved: in chunks of that many rows and bytes of values, as a dispatcher takes them.

    If no dispatcher takes anything for `patience_s`, or none leads at the start, chunks move without waiting, until one
    does again. `poll_interval_s` is the pause between two checks.
    """

    rows: int = CHUNK_ROWS
    max_bytes: int = CHUNK_BYTES
    patience_s: float = 30.0
    poll_interval_s: float = 0.02


PACE = ChunkPace()


def finish(node: Node, name: str, pace: ChunkPace = PACE) -> None:
    """Move what is left of large batches of that name, and return when all is in the outbox.

    Others may do so at the same time. Raises `BulkLost` if some of it is gone, and `BulkUnfinished` if the database
    refuses it, or cannot be reached.
    """
    queue = Queue(node.schema, pace)
    failures = 0
    while True:
        try:
            with node.connect("bulk", autocommit=True) as connection:
                while (moved := _advanced(connection, node.schema, name, pace)) is not None:
                    failures = 0
                    queue.wait(connection, moved)
            return
        except (psycopg.Error, ConnectionFailed) as error:
            failures += 1
            if failures == ATTEMPTS or meaning(error) in BLAMES:
                raise BulkUnfinished(
                    f"The batch {shown(name)} is decided, and not all of it is in the outbox yet: {described(error)}. "
                    "Nothing of it is lost. Mend that and run it again, which goes on from there; or a dispatcher does."
                ) from None
        time.sleep(pause_s(failures, LONGEST_PAUSE_S))


def give_up(node: Node, name: str, pace: ChunkPace = PACE) -> int:
    """Move all that there is of large batches of that name, give up what is lost of them, and return how much that is.

    Raises `BulkUnfinished`, and `BulkLost` where nothing is lost and something else is wrong.
    """
    messages = 0
    while True:
        try:
            finish(node, name, pace)
        except BulkLost as error:
            if error.token is None:
                raise
            with node.connect("bulk", autocommit=True) as connection, connection.transaction():
                messages += run(connection, giving_up(node.schema, name, error.token))
        else:
            return messages


def _advanced(connection: psycopg.Connection, schema: str, name: str, pace: ChunkPace) -> MovedRows | None:
    with connection.transaction():
        return run(connection, advancing(schema, name, pace.rows, pace.max_bytes))


def described(error: Exception) -> str:
    """Name an error without its text, which may repeat a row."""
    if is_of_row_security(error):
        return str(refusal(error)).rstrip(".")
    if not isinstance(error, psycopg.Error):
        return type(error).__name__
    known = (error.diag.constraint_name, *getattr(error, "__notes__", ()))
    where = "".join(f", {part}" for part in known if part)
    return f"{type(error).__name__} ({sqlstate(error)}{where})"


class Queue:
    """The messages before the next chunk in the outbox; `monotonic` and `sleep` are its clock, in seconds."""

    def __init__(
        self,
        schema: str,
        pace: ChunkPace,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._schema = schema
        self._pace = pace
        self._monotonic = monotonic
        self._sleep = sleep
        # Where to search from: others' messages stand before ours, and taking them is progress too. Below the last
        # position found are only dead rows.
        self._first = 0
        self._taken_at: float | None = None

    def wait(self, connection: psycopg.Connection, moved: MovedRows) -> None:
        """Wait until all before a chunk and about half of it was taken, or nothing is taken any more."""
        if moved.first is None or moved.last is None or not moved.more:
            return
        if self._taken_at is None:
            self._taken_at = self._monotonic() if run(connection, is_dispatched(self._schema)) else -math.inf
        half = (moved.first + moved.last) // 2
        while (found := run(connection, oldest(self._schema, self._first, half))) is not None:
            has_moved = found > self._first > 0  # there is nothing to compare the first position with
            self._first = found
            if has_moved:
                self._taken_at = self._monotonic()
            elif self._monotonic() - self._taken_at >= self._pace.patience_s:
                return
            self._sleep(self._pace.poll_interval_s)
        self._first, self._taken_at = half + 1, self._monotonic()
