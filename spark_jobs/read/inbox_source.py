"""`format("inbox")`: reads an inbox, or reaps it as a stream."""

# ruff: noqa: N802 - names of pyspark's

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import cast

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from inbox.order import finding_in_parts
from mailroom.errors import ConfigurationError
from mailroom.order.clock import MAX_CLOCK
from mailroom.sql.runner import run
from mailroom.values.names import MAX_COUNT, inbox_name, key_text, shown, topic_name
from mailroom.values.numbers import whole
from spark_jobs.arrow import message_rows
from spark_jobs.node import Node, demand_known
from spark_jobs.read.inbox_rows import Chosen, Range, batches, cutting
from spark_jobs.read.inbox_stream import InboxStreamReader
from spark_jobs.read.log_source import LogReader, Span
from spark_jobs.read.offsets import finding_ends

OPTIONS = ("inbox", "numPartitions", "columns", *Node.OPTIONS)
OF_READ = ("log", "key", "topic", "clockAbove", "clockUpto", "since", "until")
OF_STREAM = ("maxMessages", "keepBatches", "continuesCheckpoint")
MAX_PARTITIONS = 10_000
MAX_MESSAGES = 100_000
MAX_KEPT = 10_000

NOTHING = Range(0, 0)  # Spark wants a partition at least, or makes up one of its own


class InboxSource(DataSource):
    """The data source `inbox`, for `spark.read` and `spark.readStream`."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "inbox"

    def schema(self) -> str:
        """Return the columns of a message. Raises `ConfigurationError` or `InvalidName` for the options."""
        demand_known(self.options, (*OPTIONS, *OF_READ, *OF_STREAM))
        if _log(self.options) is None:
            _inbox(self.options)
        return message_rows.ddl(Chosen(columns=_columns(self.options)).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of `spark.read`. Raises `ConfigurationError`, `InvalidName` or `InvalidMessage`."""
        demand_known(self.options, (*OPTIONS, *OF_READ))
        key, topic = self.options.get("key"), self.options.get("topic")
        chosen = Chosen(
            None if key is None else key_text(key), None if topic is None else topic_name(topic), _columns(self.options)
        )
        _demand_ours(schema, chosen)
        node, number = Node.of(self.options), _number(self.options, "numPartitions", 1, MAX_PARTITIONS)
        above, upto = (_number(self.options, name, 0, MAX_CLOCK) for name in ("clockAbove", "clockUpto"))
        since, until = (_time(self.options, name) for name in ("since", "until"))
        log = _log(self.options)
        if log is not None:
            span = Span(since, until, above or 0, MAX_CLOCK if upto is None else upto)
            return LogReader(node, log, number, span, chosen)
        if since or until:
            raise ConfigurationError(
                'The options since and until are of a log: .option("log", "orders"). An inbox keeps nothing that was '
                "read.",
                code="MR-spark-option",
            )
        return InboxReader(node, _inbox(self.options), number, above, upto, chosen)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of `spark.readStream`. Raises `ConfigurationError` or `InvalidName`."""
        if "log" in self.options:
            raise ConfigurationError(
                "A stream reads a log by an inbox of its own, whose positions say what the log has to keep: mailroom "
                'inbox create NAME --log LOG, and .option("inbox", "NAME").',
                code="MR-spark-option",
            )
        demand_known(self.options, (*OPTIONS, *OF_STREAM))
        chosen = Chosen(columns=_columns(self.options))
        _demand_ours(schema, chosen)
        return InboxStreamReader(
            Node.of(self.options),
            _inbox(self.options),
            _number(self.options, "numPartitions", 1, MAX_PARTITIONS),
            _number(self.options, "maxMessages", 1, MAX_COUNT) or MAX_MESSAGES,
            keep_batches=_number(self.options, "keepBatches", 0, MAX_KEPT) or 0,
            continues=self.options.get("continuesCheckpoint"),
            chosen=chosen,
        )


def _inbox(options: Mapping[str, str]) -> str:
    name = options.get("inbox")
    if name is None:
        raise ConfigurationError('Say which inbox to read: .option("inbox", "shipping").', code="MR-spark-option")
    return inbox_name(name)


def _log(options: Mapping[str, str]) -> str | None:
    name = options.get("log")
    if name is not None and "inbox" in options:
        raise ConfigurationError("Name an inbox or a log, not both.", code="MR-spark-option")
    return None if name is None else inbox_name(name)


def _time(options: Mapping[str, str], name: str) -> datetime | None:
    text = options.get(name)
    if text is None:
        return None
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        given = None
    if given is None or given.tzinfo is None:
        raise ConfigurationError(
            f"The option {name} is {shown(text)}; give a time with its zone, such as 2030-01-31T09:00:00+01:00.",
            code="MR-spark-option",
        )
    return given


def _number(options: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20):
        raise ConfigurationError(
            f"The option {name} is {shown(text)}; give a whole number in digits.", code="MR-spark-option"
        )
    return whole(int(text), f"The option {name}", least, most, ConfigurationError)


# Up to 4.3 Spark tells no data source in Python which columns a query needs.
# D-spark-10: A read's columns are an option.
def _columns(options: Mapping[str, str]) -> tuple[str, ...]:
    text = options.get("columns")
    if text is None:
        return tuple(message_rows.ROW_COLUMNS.names)
    names = tuple(name.strip().lower() for name in text.split(","))
    unknown = [name for name in names if name not in message_rows.ROW_COLUMNS.names]
    if unknown:
        raise ConfigurationError(
            f"The option columns names {shown(unknown[0])}; the columns of a message are "
            f"{', '.join(message_rows.ROW_COLUMNS.names)}.",
            code="MR-spark-option",
        )
    if len(set(names)) < len(names):
        raise ConfigurationError("The option columns names a column twice: name it once.", code="MR-spark-option")
    return names


def _demand_ours(schema: StructType, chosen: Chosen) -> None:
    # As its type calls itself, whatever is the default.
    ours = message_rows.ddl(chosen.schema).replace("timestamp_ltz", "timestamp").split(", ")
    if [f"{field.name} {field.dataType.simpleString()}" for field in schema] != ours:
        raise ConfigurationError(
            'The columns of format("inbox") are given: leave out .schema(), and use select() or the option columns.',
            code="MR-spark-option",
        )


# Without pushFilters: up to 4.3 Spark keeps the filters that it has pushed with the DataFrame and applies them to its
# next query too, which then lacks rows. Options are the DataFrame's own.
# D-spark-12: No filter is pushed to a read.
class InboxReader(DataSourceReader):
    """Reads an inbox without locks: it waits for no session, and no session waits for it.

    It reads nothing twice and nothing above the highest clock at the time of the plan. A message that is reaped
    meanwhile may be missing.
    """

    def __init__(
        self, node: Node, inbox: str, partitions: int | None, above: int | None, upto: int | None, chosen: Chosen
    ) -> None:
        self._node = node
        self._inbox = inbox
        self._number = partitions
        self._above = above or 0
        self._upto = MAX_CLOCK if upto is None else upto
        self._chosen = chosen

    def partitions(self) -> list[Range]:
        """Freeze the last clock and cut what is there into ranges. Raises `UnknownInbox`."""
        # The messages of one key are few, and are found by the key.
        number = self._number if self._chosen.key is None else 1
        with self._node.connect(f"read {self._inbox}") as connection:
            run(connection, finding_in_parts(self._node.schema, self._inbox))
            ends = run(connection, finding_ends(self._node.schema, self._inbox))
            if ends is None:
                return [NOTHING]
            above, upto = max(ends.first - 1, self._above), min(ends.last.clock, self._upto)
            ranges = run(connection, cutting(self._node.schema, self._inbox, above, upto, number))
            seen = self._node.pinned(connection).seen
            return [replace(one, seen=seen) for one in ranges] or [NOTHING]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range."""
        wanted = cast(Range, partition)
        return iter(()) if wanted == NOTHING else batches(self._node, self._inbox, wanted, self._chosen)
