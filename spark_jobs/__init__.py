"""Spark writers and readers: exactly once into the outbox, and out of the inbox.

`drain` and `audit` are modules here, whose functions have the same names: `from spark_jobs.drain import drain`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if not all(map(find_spec, ("pyspark", "pyarrow"))):
    raise ImportError("spark_jobs needs PySpark and PyArrow: install the extra, pip install 'pg-mailroom[spark]'.")

if TYPE_CHECKING:
    from spark_jobs.drain import Drained, drain_on, drained
    from spark_jobs.node import Node
    from spark_jobs.read.cbor_decoded import from_cbor
    from spark_jobs.read.inbox_source import InboxSource
    from spark_jobs.session import spark_session
    from spark_jobs.write.commit import SendFailed, SentBatch, StagingLost
    from spark_jobs.write.finishing import BulkUnfinished
    from spark_jobs.write.ledger import BatchDiffers, StreamTaken
    from spark_jobs.write.outbox_source import OutboxSource
    from spark_jobs.write.sink import OutboxSink

_MODULES = {
    "BatchDiffers": "write.ledger",
    "BulkUnfinished": "write.finishing",
    "Drained": "drain",
    "InboxSource": "read.inbox_source",
    "Node": "node",
    "OutboxSink": "write.sink",
    "OutboxSource": "write.outbox_source",
    "SendFailed": "write.commit",
    "SentBatch": "write.commit",
    "StagingLost": "write.commit",
    "StreamTaken": "write.ledger",
    "drain_on": "drain",
    "drained": "drain",
    "from_cbor": "read.cbor_decoded",
    "spark_session": "session",
}

__all__ = [
    "BatchDiffers", "BulkUnfinished", "Drained", "InboxSource", "Node", "OutboxSink", "OutboxSource", "SendFailed",
    "SentBatch", "StagingLost", "StreamTaken", "drain_on", "drained", "from_cbor", "spark_session",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Fetched when asked for: a job's command line need not import PySpark.
    if name in _MODULES:
        return getattr(import_module(f"spark_jobs.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
