"""The consumer's side of Mailroom: reap messages in the transaction that uses them."""

from inbox.archive import Archive, AsyncArchive, Reaped
from inbox.asking.requests import AsyncPending, AsyncRequests, ErrorReply, NoReply, Pending, Requests
from inbox.by_key.parked_keys import Changed, ParkedKey
from inbox.by_key.paused_keys import PausedKey
from inbox.exceptions import Park, Reject, Retry, Skip, Unavailable
from inbox.handling.batch_handler import AsyncBatchHandler, BatchHandler
from inbox.handling.handlers import AsyncHandlers, Handlers
from inbox.inbox import AsyncInbox, Inbox
from inbox.parked import AsyncParked, Attempt, Parked
from inbox.worker.worker import AsyncWorker, Worker
from mailroom.errors import NoHandler
from mailroom.message.message import Message

__all__ = [
    "Archive",
    "AsyncArchive",
    "AsyncBatchHandler",
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
    "Skip",
    "Unavailable",
    "Worker",
]
