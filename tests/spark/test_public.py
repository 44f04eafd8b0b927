"""What users import from `spark_jobs`."""

import subprocess
import sys

import pytest

import spark_jobs


def test_all_public_names_are_there() -> None:
    assert [name for name in spark_jobs.__all__ if getattr(spark_jobs, name).__name__ != name] == []
    assert spark_jobs.__all__ == sorted(spark_jobs._MODULES)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spark_jobs.nothing


def test_package_imports_nothing_of_spark() -> None:
    code = "import sys, spark_jobs; assert not {'pyspark', 'pyarrow'} & sys.modules.keys(); spark_jobs.Node"
    subprocess.run([sys.executable, "-c", code], check=True)
