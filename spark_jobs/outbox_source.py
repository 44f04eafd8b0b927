"""`format("outbox")`."""

from pyspark.sql.datasource import DataSource


class OutboxSource(DataSource):
    """Stub while under construction."""

    @classmethod
    def name(cls) -> str:
        return "outbox"
