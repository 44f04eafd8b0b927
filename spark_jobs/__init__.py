"""Spark writers and readers: exactly once into the outbox, and out of the inbox."""

from importlib.util import find_spec

if not all(map(find_spec, ("pyspark", "pyarrow"))):
    raise ImportError("spark_jobs needs PySpark and PyArrow: install the extra, pip install 'pg-mailroom[spark]'.")
