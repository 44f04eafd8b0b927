"""The writer's side of Mailroom: commit messages in the transaction that changes your data."""

from mailroom.message.outgoing import Outgoing
from outbox.executable import Executable
from outbox.outbox import AsyncOutbox, Outbox
from outbox.store import AsyncStore, Books, Store

__all__ = ["AsyncOutbox", "AsyncStore", "Books", "Executable", "Outbox", "Outgoing", "Store"]
