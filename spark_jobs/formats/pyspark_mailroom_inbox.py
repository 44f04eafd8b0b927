"""Where Spark finds `format("inbox")`: it looks for modules named `pyspark_*`, and for this name in each."""

from contextlib import suppress

# Without the extra. An error would have Spark pass over the formats of all other packages too.
with suppress(ImportError):
    from spark_jobs.read.inbox_source import InboxSource as DefaultSource  # noqa: F401
