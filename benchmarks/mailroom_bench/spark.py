"""Spark: a DataFrame of structs written by `format("outbox")`, beside Spark's own JDBC append.

JDBC appends the same rows, with the struct as JSON since it cannot write structs, in batches of 10,000 with
reWriteBatchedInserts: once into a table of the outbox's columns, defaults and primary key, which is what an outbox
without Mailroom would be; once into a table of the three columns that are written and nothing else. Neither is exactly
once. `outbox_jdbc` takes the same append and is.

And what these rows become in an inbox, read by `format("inbox")`, beside `spark.read.jdbc` from the inbox's table: key,
clock and value, into a sink that drops them. JDBC reads them in one task, as it does unless it is told ranges, and
again in two ranges of the clock. All of it on two threads of one session, each way warmed up first.
"""

import os
import time
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg
from psycopg import conninfo

from mailroom.errors import ConfigurationError

from . import floors
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .workload import INBOX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 2
JSON = ("topic", "key", "to_json(value) AS value_json")
READ = ("key", "clock", "value")
WITH_ID = ("uuid() AS message_id", *JSON)


def missing_extra() -> str | None:
    """Say how to install the extra if it is missing."""
    return None if find_spec("pyarrow") and find_spec("pyspark") else "Run: pip install 'pg-mailroom[spark]'"


def _missing() -> str | None:
    if absent := missing_extra():
        return absent
    from spark_jobs.session import HOW_TO_GET_JDBC, java_version, jdbc_jar

    try:
        java_version()
    except ConfigurationError as error:
        return str(error)
    return None if jdbc_jar() else f"PostgreSQL's JDBC driver is not here. {HOW_TO_GET_JDBC}"


@cache
def _session(dsn: str) -> "SparkSession":
    from spark_jobs.session import spark_session

    # Spark's processes inherit this environment, so that no option contains the password.
    os.environ["PGPASSWORD"] = str(conninfo.conninfo_to_dict(dsn).get("password") or "")
    session = spark_session("mailroom bench", f"local[{PARTITIONS}]")
    session.sparkContext.setLogLevel("ERROR")
    return session


def _rows(session: "SparkSession", count: int) -> "DataFrame":
    """Messages with values of about 110 bytes as JSON, like those of the other measurements."""
    return session.range(0, count, 1, PARTITIONS).selectExpr(
        f"'{INBOX}' AS topic",
        "concat('key-', id % 1000) AS key",
        "struct(id AS number, 'UA' AS carrier, 'EWR' AS origin, 'IAH' AS destination, id * 7 % 1400 AS air_time, "
        "id * 0.5D AS delay, concat('flight ', id) AS name) AS value",
    )


def _jdbc_options(node: Node, table: str) -> dict[str, str]:
    from spark_jobs.session import DRIVER

    with psycopg.connect(node.dsn) as connection:
        at = connection.info
        server, user, password = f"{at.host}:{at.port}/{at.dbname}", at.user, at.password
    return {
        "driver": DRIVER,
        "url": f"jdbc:postgresql://{server}?reWriteBatchedInserts=true&stringtype=unspecified",
        "user": user,
        "password": password,
        "dbtable": f"{node.schema}.{table}",
        "batchsize": "10000",
    }


def _our_options(node: Node) -> dict[str, str]:
    parts = conninfo.conninfo_to_dict(node.dsn)
    parts.pop("password", None)
    return {"dsn": conninfo.make_conninfo("", **parts), "schema": node.schema}


def _jdbc(rows: "DataFrame", node: Node, table: str, columns: tuple[str, ...]) -> float:
    options = _jdbc_options(node, table)
    began = time.perf_counter()
    rows.selectExpr(*columns).write.format("jdbc").options(**options).mode("append").save()
    return time.perf_counter() - began


def _outbox(rows: "DataFrame", node: Node) -> float:
    options = _our_options(node) | {"idempotencyKey": str(uuid4())}
    began = time.perf_counter()
    rows.write.format("outbox").options(**options).mode("append").save()
    return time.perf_counter() - began


def _read(session: "SparkSession", kind: str, options: dict[str, str], expected: int) -> float:
    """Plan a read of key, clock and value, and do it, and see that all of it came."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count

    came = Observation()
    began = time.perf_counter()
    rows = session.read.format(kind).options(**options).load().select(*READ).observe(came, count("value").alias("rows"))
    rows.write.format("noop").mode("overwrite").save()
    took = time.perf_counter() - began
    if came.get["rows"] != expected:
        raise RuntimeError(f"{came.get['rows']} of {expected} messages came from {kind}")
    return took


def _seconds(setup: Setup, count: int) -> Values:
    rows = _rows(_session(setup.dsn), count).cache()
    rows.count()
    seconds: dict[str, float] = {}
    with fresh_node(setup.dsn) as node, node.awake():
        floors.make_outbox(node)
        node.execute(f"CREATE TABLE {node.schema}.three_columns (topic text, key text, value_json text)")
        seconds["JDBC, bare table"] = _jdbc(rows, node, "bare_outbox", JSON)
        seconds["JDBC, three columns"] = _jdbc(rows, node, "three_columns", JSON)
        seconds["outbox_jdbc"] = _jdbc(rows, node, "outbox_jdbc", WITH_ID)
        node.execute(f"TRUNCATE {node.outbox}")
        seconds['format("outbox")'] = _outbox(rows, node)
        node.deliver()
        seconds |= _reading(_session(setup.dsn), node, count)
    rows.unpersist()
    return seconds


def _reading(session: "SparkSession", node: Node, count: int) -> dict[str, float]:
    jdbc, ours = _jdbc_options(node, f"inbox_{INBOX}"), _our_options(node) | {"inbox": INBOX}
    with psycopg.connect(node.dsn) as connection:
        bounds = f"SELECT min(clock), max(clock) FROM {node.schema}.inbox_{INBOX}".encode()
        low, high = connection.execute(bounds).fetchone() or (0, 0)
    ranges = {"partitionColumn": "clock", "lowerBound": low, "upperBound": high, "numPartitions": PARTITIONS}
    return {
        "read.jdbc": _read(session, "jdbc", jdbc, count),
        'format("inbox")': _read(session, "inbox", ours, count),
        'format("inbox"), columns': _read(session, "inbox", ours | {"columns": ", ".join(READ)}, count),
        "read.jdbc, two ranges": _read(
            session, "jdbc", jdbc | {name: str(value) for name, value in ranges.items()}, count
        ),
    }


def _run(setup: Setup) -> Values:
    _seconds(setup, setup.messages // 10)
    count = 2 * setup.messages
    return {name: count / seconds for name, seconds in _seconds(setup, count).items()}


MEASUREMENT = Measurement(
    "spark",
    "write a DataFrame of structs from Spark, and read it, twice the messages",
    (
        Line("JDBC, bare table"),
        Line('format("outbox")', baseline="JDBC, bare table", bar=Bar(ratio_at_least=0.8)),
        Line("outbox_jdbc", baseline="JDBC, bare table"),
        Line("JDBC, three columns", baseline="JDBC, bare table"),
        Line("read.jdbc"),
        Line('format("inbox")', baseline="read.jdbc", bar=Bar(ratio_at_least=0.4)),
        Line('format("inbox"), columns', baseline="read.jdbc", bar=Bar(ratio_at_least=0.4)),
        Line("read.jdbc, two ranges", baseline="read.jdbc"),
    ),
    _run,
    _missing,
)
