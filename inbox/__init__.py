"""The consumer's side of Mailroom: reap messages in the transaction that uses them."""

from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from inbox.archive import Archive, AsyncArchive, Reaped
    from inbox.asking.requests import AsyncPending, AsyncRequests, ErrorReply, NoReply, Pending, Requests
    from inbox.by_key.parked_keys import Changed, ParkedKey
    from inbox.by_key.paused_keys import PausedKey
    from inbox.by_log.rewind import Rewound
    from inbox.exceptions import Park, Reject, Retry, Skip, Unavailable
    from inbox.failing import AsyncFailingKeys, FailingKeys
    from inbox.handling.batch_handler import AsyncBatchHandler, BatchHandler
    from inbox.handling.handlers import AsyncHandlers, Handlers
    from inbox.inbox import AsyncInbox, Inbox
    from inbox.parked import AsyncParked, Attempt, Parked
    from inbox.worker.worker import AsyncWorker, Worker
    from mailroom.errors import NoHandler
    from mailroom.figures.failing_keys import FailingError, FailingKey
    from mailroom.message.message import Message

# Imported on demand: an import of any module of the package imports this one, also in each worker process of Spark.
_HOMES = {
    "inbox.archive": ("Archive", "AsyncArchive", "Reaped"),
    "inbox.asking.requests": ("AsyncPending", "AsyncRequests", "ErrorReply", "NoReply", "Pending", "Requests"),
    "inbox.by_key.parked_keys": ("Changed", "ParkedKey"),
    "inbox.by_key.paused_keys": ("PausedKey",),
    "inbox.by_log.rewind": ("Rewound",),
    "inbox.failing": ("AsyncFailingKeys", "FailingKeys"),
    "inbox.exceptions": ("Park", "Reject", "Retry", "Skip", "Unavailable"),
    "inbox.handling.batch_handler": ("AsyncBatchHandler", "BatchHandler"),
    "inbox.handling.handlers": ("AsyncHandlers", "Handlers"),
    "inbox.inbox": ("AsyncInbox", "Inbox"),
    "inbox.parked": ("AsyncParked", "Attempt", "Parked"),
    "inbox.worker.worker": ("AsyncWorker", "Worker"),
    "mailroom.errors": ("NoHandler",),
    "mailroom.figures.failing_keys": ("FailingError", "FailingKey"),
    "mailroom.message.message": ("Message",),
}

__all__ = [
    "Archive",
    "AsyncArchive",
    "AsyncBatchHandler",
    "AsyncFailingKeys",
    "AsyncHandlers",
    "AsyncInbox",
    "AsyncParked",
    "AsyncPending",
    "AsyncRequests",
    "AsyncWorker",
    "Attempt",
    "BatchHandler",
    "Changed",
    "ErrorReply",
    "FailingError",
    "FailingKey",
    "FailingKeys",
    "Handlers",
    "Inbox",
    "Message",
    "NoHandler",
    "NoReply",
    "Park",
    "Parked",
    "ParkedKey",
    "PausedKey",
    "Pending",
    "Reaped",
    "Reject",
    "Requests",
    "Retry",
    "Rewound",
    "Skip",
    "Unavailable",
    "Worker",
]


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
