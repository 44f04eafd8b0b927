"""`python -m spark_jobs.send`: files of any size that Spark can read, as messages."""

from pathlib import PurePosixPath

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, say
from mailroom.cli.parameters import OneOf
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from spark_jobs.command import dsn_variable, job, main, node_of, session
from spark_jobs.node import Node
from spark_jobs.write.ledger import SparkBatch, finding_entry

FORMATS = ("csv", "json", "parquet", "orc")


@job(
    "send",
    epilog="\b\nExamples:\n"
    "  python -m spark_jobs.send flights.csv --topic flights --key tail_number --name flights-2013\n"
    "  python -m spark_jobs.send s3a://lake/orders --format parquet --topic order.paid --key order_id \\\n"
    '    --value "struct(order_id, total)" --where "state = \'paid\'" --order-by paid_at --name orders-2026-11-21',
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--topic", required=True, help="The topic of all messages.")
@click.option(
    "--name",
    required=True,
    metavar="TEXT",
    help="The idempotency key: names these rows in the ledger. Run again with the same key, it sends nothing twice.",
)
@click.option("--key", metavar="EXPR", help="The key of each message, in Spark SQL: a column, say. Without: no order.")
@click.option("--value", metavar="EXPR", default="struct(*)", show_default=True, help="The value, in Spark SQL.")
@click.option("--where", metavar="EXPR", help="Only rows for which this is true, in Spark SQL.")
@click.option(
    "--order-by",
    metavar="EXPR",
    multiple=True,
    help="Send in this order, in Spark SQL; may be repeated. Else by file names, and as in the files.",
)
@click.option("--kind", type=OneOf(("M", "E", "C")), default="M", show_default=True, help="Message, event, command.")
@click.option("--format", "kind_of_file", type=OneOf(FORMATS), help="The format of the files; else by their names.")
@click.option("--columns", metavar="DDL", help="The files' columns, such as 'number int, day date'; else inferred.")
@click.option(
    "--option", "reading", metavar="NAME=VALUE", multiple=True, help="An option of Spark's reader, e.g. sep=;"
)
@click.option(
    "--on-known-batch",
    type=OneOf(("compare", "pass")),
    default="compare",
    show_default=True,
    help="If the ledger already has the name: check that the rows are the same, or pass over them.",
)
@click.option("--staging-schema", metavar="NAME", help="The schema where tasks stage; else the node's.")
@dsn_variable
@pass_call
def command(
    call: Call, paths: tuple[str, ...], topic: str, name: str, key: str | None, value: str, where: str | None,
    order_by: tuple[str, ...], kind: str, kind_of_file: str | None, columns: str | None, reading: tuple[str, ...],
    on_known_batch: str, staging_schema: str | None, dsn_variable: str | None,
) -> None:  # fmt: skip
    """Send each row of the files at PATH... as a message: all of them once, or none.

    A CSV file has a first line with the names of its columns. Files of several PATHs are one table.
    """
    node, batch = node_of(call, dsn_variable), SparkBatch(name)
    node.check()
    file_format = kind_of_file or _format(paths)
    from pyspark.sql.functions import expr, monotonically_increasing_id

    with session(f"send {name}") as spark:
        reader = spark.read.format(file_format).options(**_reading(file_format, reading, inferred=columns is None))
        rows = (reader if columns is None else reader.schema(columns)).load(list(paths))
        if where is not None:
            rows = rows.where(where)
        if order_by:
            rows = rows.orderBy(*map(expr, order_by))
        elif len(rows.inputFiles()) > 1:  # which Spark would read by their size
            rows = rows.orderBy("_metadata.file_path", "_metadata.file_block_start", monotonically_increasing_id())
        messages = rows.selectExpr(*([] if key is None else [f"string({key}) AS key"]), f"{value} AS value")
        options = {"schema": node.schema, "dsn": node.dsn, "dsnVariable": dsn_variable, "stagingSchema": staging_schema}
        options |= {"topic": topic, "kind": kind, "idempotencyKey": name, "onKnownBatch": on_known_batch}
        before, _ = _entry(node, batch)
        writer = messages.write.format("outbox").mode("append")
        writer.options(**{option: text for option, text in options.items() if text is not None}).save()
    count, at = _entry(node, batch)
    if call.json:
        document({"name": name, "messages": count, "at": at, "passed_over": before})
    elif before:
        say(f"{count:,} messages of {name} are in the outbox since {at}: passed over now.")
    else:
        say(f"{count:,} messages of {name} are in the outbox since {at}." if count else "There were no rows to send.")


def _format(paths: tuple[str, ...]) -> str:
    suffixes = {PurePosixPath(path.removesuffix(".gz")).suffix.lstrip(".") for path in paths}
    if len(suffixes) == 1 and suffixes <= set(FORMATS):
        return suffixes.pop()
    raise ConfigurationError(
        f"The names do not say what the files are: give --format, one of {', '.join(FORMATS)}.", code="MR-spark-option"
    )


def _reading(file_format: str, given: tuple[str, ...], *, inferred: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    if file_format in ("csv", "json"):
        options["mode"] = "FAILFAST"
    if file_format == "csv":
        # With pruning Spark skips the columns that no message needs, and takes rows that are broken there.
        options |= {"header": "true", "inferSchema": str(inferred).lower(), "columnPruning": "false"}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigurationError(f"--option {option} is not NAME=VALUE.", code="MR-spark-option")
        options[name] = value
    return options


def _entry(node: Node, batch: SparkBatch) -> tuple[int, str | None]:
    with node.connect("send", autocommit=True) as connection:
        return run(connection, finding_entry(node.schema, batch)) or (0, None)


if __name__ == "__main__":
    main(command)
