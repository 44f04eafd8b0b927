"""What the page about clusters says of passwords that Spark hands to executors: what Spark hides, and what it shows."""

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.pages import page_named

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = page_named("spark-cluster.md").read_text()
[ADVISED] = re.findall(r"`spark\.redaction\.regex=(.+)`", PAGE)


@pytest.fixture
def default(spark: "SparkSession") -> str:
    """The default of `spark.redaction.regex`."""
    jvm: Any = spark._jvm
    config = getattr(jvm.org.apache.spark.internal.config, "package$")
    return str(getattr(config, "MODULE$").SECRET_REDACTION_PATTERN().defaultValueString())


def test_spark_hides_variables_by_their_names(default: str) -> None:
    for variable, hidden in (("PGPASSWORD", True), ("ORDERS_SECRET_DSN", True), ("MAILROOM_DSN", False)):
        assert variable in PAGE
        assert bool(re.search(default, f"spark.executorEnv.{variable}")) is hidden, variable


def test_advice_of_the_page_hides_all_of_them_and_what_spark_hides(default: str) -> None:
    assert all(re.search(ADVISED, f"spark.executorEnv.{name}") for name in ("PGPASSWORD", "MAILROOM_DSN"))
    assert set(default.split("|")) <= set(ADVISED.split("|"))
