"""One run: Spark sends the flights, the dispatcher delivers them, drains take them out; each is killed or repeated."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame

from examples.flights.processes import Processes
from examples.flights.run import RunFailed
from examples.flights.tables import INBOX
from examples.pipeline.flights import TOPIC, messages
from spark_jobs.drain import drain
from spark_jobs.node import Node

IDEMPOTENCY_KEY = "flights-2013"
EPOCH_MESSAGES = 50_000
DRAIN_STARTS_WITHIN_S = 60
LOOK_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Times:
    """What a run took, in seconds."""

    send_s: float
    drain_s: float


def run(
    node: Node,
    dsn: str,
    rows: DataFrame,
    count: int,
    drained: Path,
    logs: Path,
    deadline: float,
    tell: Callable[[str], None],
) -> Times:
    """Bring `count` rows through `node` into Parquet files below `drained`. Raises `RunFailed` after `deadline`."""
    drained.mkdir()
    began = time.monotonic()
    send(node, rows)
    sent = time.monotonic()
    tell(f"Sent {count:,} flights: {count / (sent - began):,.0f}/s from the CSV to the outbox's COMMIT.")
    send(node, rows)
    tell("Sent the same again under the same idempotency key: nothing happened.")
    with Processes(dsn, node.schema, logs, workers=0) as processes:
        killed = _killed_drain(node, drained, logs)
        tell(f"SIGKILL to a drain ({killed}) in the midst of its work.")
        dispatcher = processes.dispatcher
        tell(f"SIGKILL to the dispatcher ({dispatcher.pid}).")
        dispatcher.kill()
        dispatcher.start_again()
        began, taken = time.monotonic(), _taken(node)
        before = taken
        while taken < count:
            if time.monotonic() > deadline:
                raise RunFailed(f"Out of time: {taken:,} of {count:,} flights are in files.")
            for process in processes.ended():
                raise RunFailed(f"The {process.name} ended by itself with exit code {process.exit_code()}.")
            taken += drain(node, INBOX, str(drained), max_messages=EPOCH_MESSAGES).messages
            time.sleep(LOOK_INTERVAL_S)
        took = time.monotonic() - began
    tell(f"Drained {taken - before:,} more: {(taken - before) / took:,.0f}/s into Parquet, while they were delivered.")
    return Times(sent - began, took)


def send(node: Node, rows: DataFrame) -> None:
    """Write the rows into the outbox, all of them once."""
    writer = messages(rows).write.format("outbox").mode("append")
    writer.options(schema=node.schema, topic=TOPIC, idempotencyKey=IDEMPOTENCY_KEY).save()


def _killed_drain(node: Node, drained: Path, logs: Path) -> int:
    """Start a drain by its command, and kill it while it writes a file."""
    command = [sys.executable, "-m", "spark_jobs.drain", INBOX, str(drained), "--schema", node.schema]
    with (logs / "drain.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=logs, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - ours
    patience = time.monotonic() + DRAIN_STARTS_WITHIN_S
    while process.poll() is None and time.monotonic() < patience and not any(drained.iterdir()):
        time.sleep(LOOK_INTERVAL_S)
    process.kill()
    process.wait()
    return process.pid


def _taken(node: Node) -> int:
    with node.connect("pipeline", autocommit=True) as connection:
        query = f"SELECT coalesce(sum(messages), 0)::bigint FROM {node.schema}.spark_drain"
        [(taken,)] = connection.execute(query.encode()).fetchall()
    return int(taken)
