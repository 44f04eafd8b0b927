"""`format("inbox")`."""

from pyspark.sql.datasource import DataSource


class InboxSource(DataSource):
    """Stub while under construction."""

    @classmethod
    def name(cls) -> str:
        return "inbox"
