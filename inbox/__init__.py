"""The consumer's side of Mailroom: reap messages in the transaction that uses them."""

from inbox.exceptions import Park, Rejected, Retry, Skip, Unavailable
from inbox.handlers import AsyncHandlers, Handlers
from inbox.inbox import AsyncInbox, Inbox
from inbox.parked import AsyncParked, Parked
from inbox.worker.worker import AsyncWorker, Worker
from mailroom.errors import NoHandler
from mailroom.message import Message

__all__ = [
    "AsyncHandlers",
    "AsyncInbox",
    "AsyncParked",
    "AsyncWorker",
    "Handlers",
    "Inbox",
    "Message",
    "NoHandler",
    "Park",
    "Parked",
    "Rejected",
    "Retry",
    "Skip",
    "Unavailable",
    "Worker",
]
