"""`format("faulty-outbox")`: the outbox's writers, which fail once where their options say, and then work."""

import os
import signal
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_jobs.write.outbox_source import JobWriter, OutboxSource, StreamWriter

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class Faults:
    """What goes wrong: the options `killTask` and `failCommit` name a file each, which is there until it has."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.kill_task = options.pop("killTask", None)
        self.fail_commit = options.pop("failCommit", None)

    def after_staging(self) -> None:
        context = TaskContext.get()
        assert context is not None
        if self.kill_task and context.partitionId() == 1 and take(self.kill_task):
            os.kill(os.getpid(), signal.SIGKILL)

    def after_commit(self) -> None:
        if self.fail_commit and take(self.fail_commit):
            raise RuntimeError("the driver's commit dies after the database's")


def take(file: str) -> bool:
    """Tell whether the file was there, and remove it: of several that ask, one is told so."""
    try:
        Path(file).unlink()
    except FileNotFoundError:
        return False
    return True


class FaultyJobWriter(JobWriter):
    faults: Faults

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        message = super().write(iterator)
        self.faults.after_staging()
        return message

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        super().commit(messages)
        self.faults.after_commit()


class FaultyStreamWriter(StreamWriter):
    faults: Faults

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        message = super().write(iterator)
        self.faults.after_staging()
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        super().commit(messages, batchId)
        self.faults.after_commit()


class FaultySource(OutboxSource):
    @classmethod
    def name(cls) -> str:
        return "faulty-outbox"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.faults = Faults(options)
        super().__init__(options)

    def writer(self, schema: StructType, overwrite: bool) -> FaultyJobWriter:
        plain = super().writer(schema, overwrite)
        writer = FaultyJobWriter(plain.options, plain.shape, plain.name)
        writer.faults = self.faults
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> FaultyStreamWriter:  # noqa: N802 - Spark's name
        plain = super().streamWriter(schema, overwrite)
        writer = FaultyStreamWriter(plain.options, plain.shape, plain.name)
        writer.faults = self.faults
        return writer
