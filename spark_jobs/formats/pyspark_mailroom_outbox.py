"""Where Spark finds `format("outbox")`: it looks for modules named `pyspark_*`, and for this name in each."""

from contextlib import suppress

# Without the extra. An error would have Spark pass over the formats of all other packages too.
with suppress(ImportError):
    from spark_jobs.write.outbox_source import OutboxSource as DefaultSource  # noqa: F401
