"""The formats are found by their names, in a session that was told nothing: from SQL, and by Scala's writers too."""

from typing import TYPE_CHECKING

import pytest

from mailroom import create_inbox
from mailroom.testing import deliver
from outbox import Outbox
from tests.spark.frames import frame, sent
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def session(spark: "SparkSession") -> "SparkSession":
    """A session that knows only what it finds by itself."""
    return spark.newSession()


def test_view_of_an_inbox_in_sql(session: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping", ["order.paid"])
        for number in range(3):
            Outbox().send(connection, "order.paid", number, key="order-42")
        deliver(connection)
    session.sql(f'CREATE TEMPORARY VIEW waiting USING inbox OPTIONS (inbox "shipping", dsn "{spark_dsn}")')
    assert session.sql("SELECT key, count(*) FROM waiting GROUP BY key").collect() == [("order-42", 3)]


def test_rows_written_by_scalas_api(session: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    writer = frame(session, 100)._jdf.write().format("outbox").mode("append")
    for name, text in {"topic": "numbers", "idempotencyKey": "job", "dsn": spark_dsn}.items():
        writer.option(name, text)
    writer.save()
    assert sent(connect) == list(range(100))
