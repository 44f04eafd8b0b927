"""The Parquet files of a drain: their names, their columns, and how they are written while rows are still reaped."""

import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any
from uuid import UUID, uuid4

import pyarrow as pa
from pyarrow import parquet

from mailroom.sql.operation import Row
from spark_jobs.archive.folder import Folder
from spark_jobs.arrow import message_rows

FILE_COLUMNS = pa.schema(
    [("inbox", pa.string()), *message_rows.ROW_COLUMNS, ("segment", pa.int64()), ("shard", pa.int32())]
)
# Spark cannot infer the columns of a directory that has no file yet.
SPARK_COLUMNS = message_rows.ddl(FILE_COLUMNS)
REPEATED = ["inbox", "key", "origin", "topic", "kind", "message_type", "event_type", "source", "segment", "shard"]

# A row group is full with as many rows, or with as many bytes of values and the claim that goes past them.
GROUP = 10_000
GROUP_BYTES = 64 * 2**20
UNWRITTEN = 2  # row groups that are written or wait for it: with the one that fills, the memory that a file takes
VALUE, VALUE_JSON = (message_rows.ROW_COLUMNS.get_field_index(name) for name in ("value", "value_json"))


@dataclass(frozen=True, slots=True)
class Series:
    """The files of one shard of one inbox of one node, numbered by the database."""

    node: UUID
    inbox: str
    shard: int

    @property
    def prefix(self) -> str:
        """What the name of each file begins with; nodes may share a directory."""
        return f"{self.inbox}-{_short(self.node)}-{self.shard:03}-"

    def attempts(self, segment: int) -> str:
        """What the hidden name of each attempt at a segment begins with; in the order of the segments."""
        return f".{self.prefix}{segment:012}"

    def hidden(self, segment: int) -> str:
        """Return a name that no other attempt has. Readers pass over names that begin so, and `*.parquet` too."""
        return f"{self.attempts(segment)}-{uuid4().hex}.part"

    def final(self, segment: int) -> str:
        """Return the name by which readers find the file."""
        return f"{self.prefix}{segment:012}.parquet"


def files_of(node: UUID) -> str:
    """Return the pattern of the names of a node's files; other nodes may drain into the same directory."""
    return f"*-{_short(node)}-*.parquet"


def _short(node: UUID) -> str:
    return node.hex[:8]


def attempt_of(hidden: str) -> str:
    """Return which attempt has this hidden name; it is also written in the file."""
    return hidden.rpartition("-")[2].removesuffix(".part")


def attempt_in(folder: Folder, name: str) -> str | None:
    """Return which attempt wrote the file; None if it is not a file of a drain."""
    with folder.open(name) as file:
        try:
            found = (parquet.read_schema(file).metadata or {}).get(b"mailroom.attempt")
        except pa.ArrowInvalid:
            return None
    return None if found is None else str(found, "ascii", "replace")


class SegmentFile:
    """A file that a thread of its own writes, so that the database and the disk do not wait for each other."""

    def __init__(self, folder: Folder, series: Series, segment: int) -> None:
        self.name = series.hidden(segment)
        self.messages = 0  # both include what has yet to be written
        self.value_bytes = 0
        self._folder = folder
        self._series = series
        self._segment = segment
        self._group: list[Row] = []
        self._group_bytes = 0
        self._thread = ThreadPoolExecutor(1, "drain")
        self._unwritten: deque[Future[None]] = deque()
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def __enter__(self) -> "SegmentFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
        self._thread.shutdown()

    def add(self, rows: Sequence[Row]) -> int:
        """Add the rows of a claim, and return the bytes of their values; waits while the writer is behind."""
        size = sum(len(row[VALUE] or row[VALUE_JSON] or b"") for row in rows)
        self.messages += len(rows)
        self.value_bytes += size
        self._group += rows
        self._group_bytes += size
        if len(self._group) >= GROUP or self._group_bytes >= GROUP_BYTES:
            self._flush()
        return size

    def _flush(self) -> None:
        self._unwritten.append(self._thread.submit(self._write, self._group))
        self._group, self._group_bytes = [], 0
        while len(self._unwritten) > UNWRITTEN:
            self._unwritten.popleft().result()

    def seal(self) -> None:
        """Finish the file; once this has returned it is complete and durable, under its hidden name."""
        if self._group:
            self._flush()
        while self._unwritten:
            self._unwritten.popleft().result()
        if self._file is not None:
            self._writer.close()
            self._folder.seal(self.name, self._file)

    def _write(self, rows: Sequence[Row]) -> None:
        if self._file is None:
            about = {"inbox": self._series.inbox, "shard": str(self._series.shard), "segment": str(self._segment)}
            about |= {"node": str(self._series.node), "attempt": attempt_of(self.name)}
            schema = FILE_COLUMNS.with_metadata({f"mailroom.{name}": text for name, text in about.items()})
            self._file = self._folder.create(self.name)
            self._writer = parquet.ParquetWriter(
                self._file, schema, compression="zstd", use_dictionary=REPEATED, write_page_checksum=True
            )
        self._writer.write_table(_table(rows, self._series, self._segment))

    def _discard(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._file is None:
            return
        # The error has been raised already; an incomplete file cannot be closed properly.
        with contextlib.suppress(OSError, ValueError, pa.ArrowException), self._file:
            if self._writer is not None:
                self._writer.close()
        if self._writer is not None:
            self._writer.is_open = False  # else it tries once more when it is collected
        with contextlib.suppress(OSError):  # it is hidden, and the next drain deletes it
            self._folder.delete(self.name)


def _table(rows: Sequence[Row], series: Series, segment: int) -> pa.Table:
    """Make the table of rows of a claim as a `RawCursor` gives them."""
    of_all = ((series.inbox, pa.string()), (segment, pa.int64()), (series.shard, pa.int32()))
    inboxes, segments, shards = (pa.repeat(pa.scalar(value, kind), len(rows)) for value, kind in of_all)
    return pa.Table.from_arrays([inboxes, *message_rows.arrays(rows), segments, shards], schema=FILE_COLUMNS)
