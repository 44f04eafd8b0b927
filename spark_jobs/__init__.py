"""Spark writers and readers: exactly once into the outbox, and out of the inbox.

`drain` and `audit` are modules here, whose functions have the same names: `from spark_jobs.drain import drain`.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

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

# Imported on demand: a job's command line need not import PySpark.
_HOMES = {
    "spark_jobs.drain": ("Drained", "drain_on", "drained"),
    "spark_jobs.node": ("Node",),
    "spark_jobs.read.cbor_decoded": ("from_cbor",),
    "spark_jobs.read.inbox_source": ("InboxSource",),
    "spark_jobs.session": ("spark_session",),
    "spark_jobs.write.commit": ("SendFailed", "SentBatch", "StagingLost"),
    "spark_jobs.write.finishing": ("BulkUnfinished",),
    "spark_jobs.write.ledger": ("BatchDiffers", "StreamTaken"),
    "spark_jobs.write.outbox_source": ("OutboxSource",),
    "spark_jobs.write.sink": ("OutboxSink",),
}

__all__ = [
    "BatchDiffers", "BulkUnfinished", "Drained", "InboxSource", "Node", "OutboxSink", "OutboxSource", "SendFailed",
    "SentBatch", "StagingLost", "StreamTaken", "drain_on", "drained", "from_cbor", "spark_session",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
