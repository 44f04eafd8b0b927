"""A driver of its own on a cluster of two executor processes, for tests that kill parts of it.

`python -m tests.spark.cluster DSN DIRECTORY SCENARIO`. A fault is a file in DIRECTORY, gone once it has happened.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil
import pyspark
from psycopg.conninfo import conninfo_to_dict
from pyspark import TaskContext
from pyspark.sql import functions as f
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_jobs.node import Node
from spark_jobs.session import spark_session
from spark_jobs.write.outbox_source import JobWriter, OutboxSource
from spark_jobs.write.sink import OutboxSink
from tests.spark.faulty import take
from tests.spark.frames import frame, message
from tests.spark.quick import JAVA
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession

ROWS = 4_000
PATIENCE_S = 60
CLUSTER = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.executor.extraJavaOptions": JAVA,
}
SPARK_CLASS = [str(Path(pyspark.__file__).parent / "bin" / "spark-class")]


class Writer(JobWriter):
    """Kills the executor of one task after its staging commit, or makes one task wait for its speculative copy."""

    faults: Path

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        staged = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and take(str(self.faults / "kill-executor")):
            [java] = [parent for parent in psutil.Process().parents() if parent.name() == "java"][:1]
            java.send_signal(signal.SIGKILL)
        if context.partitionId() == 1 and take(str(self.faults / "straggle")):
            deadline = time.monotonic() + PATIENCE_S
            while staging_tables(self.options.node) < 5 and time.monotonic() < deadline:
                time.sleep(0.05)
        return staged


def staging_tables(node: Node) -> int:
    with node.connect("test") as connection:
        [tables] = connection.execute("SELECT count(*) FROM mailroom.spark_staging").fetchone() or (0,)
    return int(tables)


class Source(OutboxSource):
    @classmethod
    def name(cls) -> str:
        return "straggling-outbox"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.faults = Path(options.pop("faults"))
        super().__init__(options)

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        plain = super().writer(schema, overwrite)
        writer = Writer(plain.options, plain.shape, plain.name)
        writer.faults = self.faults
        return writer


def lose_an_executor(dsn: str, directory: Path) -> None:
    """Write while the executor that runs one of the tasks is killed."""
    session = spark_session("mailroom tests", "local-cluster[2,1,1024]", {"spark.executor.memory": "1g", **CLUSTER})
    write(session, dsn, directory, "kill-executor")
    session.stop()


def lose_all_executors(dsn: str, directory: Path) -> None:
    """Send what a shuffle spreads by a key that does not repeat, while all executors die after a task's COMMIT."""
    session = spark_session("mailroom tests", "local-cluster[2,1,1024]", {"spark.executor.memory": "1g", **CLUSTER})
    spread = f.udf(lambda: str(uuid4()), "string").asNondeterministic()
    rows = frame(session, ROWS).withColumn("spread", spread()).repartition(4, "spread").drop("spread")
    with proxied(f"postgresql://{conninfo_to_dict(dsn)['host']}:{conninfo_to_dict(dsn)['port']}") as (proxy, _):

        def at_commit() -> CommitFault:
            if not take(str(directory / "kill-all")):
                return CommitFault.NONE
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # Spark runs many that live for a moment
                    if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                        process.kill()
            return CommitFault.HOLD  # until the task is gone; then it passes

        (directory / "kill-all").touch()
        proxy.at_commits(at_commit, held_s=0.0)
        OutboxSink("numbers", topic="numbers", dsn=f"{dsn} port={proxy.port}")(rows, 0)
    session.stop()


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "50ms",
}


def speculate(dsn: str, directory: Path) -> None:
    """Write while one of the tasks straggles, so that Spark runs it twice: it does on another host only."""
    with standalone(directory) as master:
        session = spark_session("mailroom tests", master, {**SPECULATION, **CLUSTER})
        write(session, dsn, directory, "straggle")
        session.stop()


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Give the URL of a master with two workers, each on an address of its own of this machine."""
    log = directory / "master.log"
    with ExitStack() as processes:
        master = [*SPARK_CLASS, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0"]
        processes.enter_context(running([*master, "--webui-port", "0"], log))
        found: list[str] = []

        def is_up() -> bool:
            found[:] = re.findall(r"spark://127\.0\.0\.1:[1-9]\d*", log.read_text())
            return bool(found)

        eventually(is_up, PATIENCE_S)
        for host in ("127.0.0.1", "127.0.0.2"):
            worker = [*SPARK_CLASS, "org.apache.spark.deploy.worker.Worker", "--host", host, "--port", "0", "-c", "2"]
            worker += ["-m", "1g", "--webui-port", "0", "--work-dir", str(directory / host), found[0]]
            processes.enter_context(running(worker, directory / f"{host}.log"))
        yield found[0]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def write(session: "SparkSession", dsn: str, directory: Path, fault: str) -> None:
    session.dataSource.register(Source)
    (directory / fault).touch()
    rows = frame(session, ROWS).write.format("straggling-outbox").mode("append")
    rows.options(topic="numbers", idempotencyKey="job", dsn=dsn, faults=str(directory)).save()


def stream(dsn: str, directory: Path) -> None:
    """Stream the files of `source` into the outbox until all are sent; it is killed midway, and begins again."""
    session = spark_session("mailroom tests", "local[2]")
    rows = session.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(directory / "source"))
    query = (
        rows.select(*message(f.col("id")))
        .writeStream.format("outbox")
        .options(topic="numbers", streamName="numbers", dsn=dsn, checkpointLocation=str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    session.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    scenarios = (lose_an_executor, lose_all_executors, speculate, stream)
    {each.__name__: each for each in scenarios}[sys.argv[3]](sys.argv[1], Path(sys.argv[2]))
