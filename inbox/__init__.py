"""The consumer's side of Mailroom: reap messages in the transaction that uses them."""

from inbox.exceptions import Park, Reject, Retry, Skip, Unavailable
from inbox.handlers import AsyncHandlers, Handlers
from inbox.inbox import AsyncInbox, Inbox
from inbox.parked import AsyncParked, Attempt, Parked
from inbox.parked_keys import Changed, ParkedKey
from inbox.requests import AsyncPending, AsyncRequests, ErrorReply, NoReply, Pending, Requests
from inbox.worker.batch_handler import AsyncBatchHandler, BatchHandler
from inbox.worker.worker import AsyncWorker, Worker
from mailroom.errors import NoHandler
from mailroom.message import Message

__all__ = [
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
    "Pending",
    "Reject",
    "Requests",
    "Retry",
    "Skip",
    "Unavailable",
    "Worker",
]
