"""The consumer's side of Mailroom: reap messages in the transaction that uses them."""

from inbox.exceptions import Park, Retry, Skip
from inbox.inbox import AsyncInbox, Inbox
from inbox.parked import AsyncParked, Parked
from inbox.worker.worker import AsyncWorker, Worker
from mailroom.message import Message

__all__ = ["AsyncInbox", "AsyncParked", "AsyncWorker", "Inbox", "Message", "Park", "Parked", "Retry", "Skip", "Worker"]
