"""The writer's side of Mailroom: commit messages in the transaction that changes your data."""

from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from mailroom.message.outgoing import Outgoing
    from mailroom.message.periodic import PeriodicMessage
    from outbox.executable import Executable
    from outbox.outbox import AsyncOutbox, Outbox
    from outbox.periodic.periodic import AsyncPeriodic, Periodic, PeriodicState
    from outbox.store import AsyncStore, Books, Store
    from outbox.webhooks.app import WebhookApp

# Imported on demand: an import of any module of the package imports this one, also in each worker process of Spark.
_HOMES = {
    "mailroom.message.outgoing": ("Outgoing",),
    "mailroom.message.periodic": ("PeriodicMessage",),
    "outbox.executable": ("Executable",),
    "outbox.outbox": ("AsyncOutbox", "Outbox"),
    "outbox.periodic.periodic": ("AsyncPeriodic", "Periodic", "PeriodicState"),
    "outbox.store": ("AsyncStore", "Books", "Store"),
    "outbox.webhooks.app": ("WebhookApp",),
}

__all__ = [
    "AsyncOutbox",
    "AsyncPeriodic",
    "AsyncStore",
    "Books",
    "Executable",
    "Outbox",
    "Outgoing",
    "Periodic",
    "PeriodicMessage",
    "PeriodicState",
    "Store",
    "WebhookApp",
]


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
