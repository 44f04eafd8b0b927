"""The consumer's side of Mailroom: reap messages in the transaction that uses them."""

from inbox.inbox import AsyncInbox, Inbox
from inbox.worker import AsyncWorker, Worker
from mailroom.message import Message

__all__ = ["AsyncInbox", "AsyncWorker", "Inbox", "Message", "Worker"]
