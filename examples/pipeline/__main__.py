"""`python -m examples.pipeline`: a run, shown."""

import os
import tempfile
import time
from pathlib import Path

import click

from examples.flights.run import RunFailed
from examples.flights.source import ALL_FLIGHTS
from examples.flights.tables import remake
from examples.pipeline.flights import flights, unpack
from examples.pipeline.run import run
from examples.pipeline.truth import verify
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, note, table
from mailroom.session import settings
from spark_jobs.command import job, main
from spark_jobs.node import Node
from spark_jobs.session import java_version, spark_session

NODE = "mailroom_pipeline"
TIME_LIMIT_S = 300


@job("pipeline")
@click.option(
    "--flights",
    "count",
    type=click.IntRange(1, ALL_FLIGHTS),
    default=ALL_FLIGHTS,
    show_default=True,
    help="Take only this many flights, from the first on.",
)
@pass_call
def command(call: Call, count: int) -> None:
    """Send real flights from a CSV through Spark, Mailroom and Spark again, and compare what came out with the CSV.

    CSV -> Spark -> outbox -> dispatcher -> inbox -> drain -> Parquet -> Spark. The job is run twice, a drain and the
    dispatcher are killed. At the end Spark reads the CSV again, compares row for row, and audits order and
    exactly-once over all of it.

    Without --dsn and MAILROOM_DSN it runs on the embedded server. Its schema, mailroom_pipeline (or --schema), is made
    again by each run, and stays for you to inspect. Exit code 1 if anything went wrong or took too long.
    """
    java_version()
    deadline = time.monotonic() + TIME_LIMIT_S
    dsn = call.dsn(embedded_by_default=True)
    node = Node(call.given_schema or NODE)
    # Spark's processes have the environment of the one that starts them, and no option has the password.
    os.environ[settings.DSN_VARIABLE] = dsn
    with tempfile.TemporaryDirectory(prefix="mailroom-pipeline-") as name:
        directory = Path(name)
        remake(dsn, node.schema)
        spark = spark_session("mailroom pipeline", config={"spark.sql.session.timeZone": "UTC"})
        try:
            rows = flights(spark, unpack(directory), count)
            times = run(node, dsn, rows, count, directory / "drained", directory, deadline, note)
            checks = verify(spark, node, rows, directory / "drained")
        finally:
            spark.stop()
    if call.json:
        document({"flights": count, "send_s": times.send_s, "drain_s": times.drain_s, "checks": checks})
    else:
        table(("check", "ok", "what the files say"), [(check.name, check.ok, check.detail) for check in checks])
    wrong = [check.name for check in checks if not check.ok]
    if wrong:
        raise RunFailed(f"Something went wrong: not {', not '.join(wrong)}.")
    note(f"All {count:,} flights came out of Parquet as they stand in the CSV, each once and in order.")


if __name__ == "__main__":
    main(command)
