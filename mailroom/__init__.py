"""Mailroom: transactional messaging inside PostgreSQL. What the writer's and the consumer's side agree on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mailroom.carry import carrying
from mailroom.errors import CommitUnknown, NotAtomic, TokenExpired
from mailroom.packages import warn_of_hidden

if TYPE_CHECKING:
    from mailroom.commit import Outcome, atomically, atomically_async, resolve, resolve_async
    from mailroom.lamport import LamportClock, Stamp
    from mailroom.links.links import AsyncLinks, Links
    from mailroom.schema.drop import drop_inbox, drop_inbox_async
    from mailroom.schema.inboxes import create_inbox, create_inbox_async
    from mailroom.schema.rename import rename_inbox, rename_inbox_async
    from mailroom.schema.subscriptions import subscribe, subscribe_async, unsubscribe, unsubscribe_async
    from mailroom.settings import dsn
    from mailroom.topic import Topic
    from mailroom.watching import Watched, unwatch, unwatch_async, watch, watch_async, watched, watched_async

__version__ = "0.1.0"

__all__ = [
    "AsyncLinks",
    "CommitUnknown",
    "LamportClock",
    "Links",
    "NotAtomic",
    "Outcome",
    "Stamp",
    "TokenExpired",
    "Topic",
    "Watched",
    "atomically",
    "atomically_async",
    "carrying",
    "create_inbox",
    "create_inbox_async",
    "drop_inbox",
    "drop_inbox_async",
    "dsn",
    "rename_inbox",
    "rename_inbox_async",
    "resolve",
    "resolve_async",
    "subscribe",
    "subscribe_async",
    "unsubscribe",
    "unsubscribe_async",
    "unwatch",
    "unwatch_async",
    "watch",
    "watch_async",
    "watched",
    "watched_async",
]

# Imported on demand: whoever imports any module of the package imports this one, and should not load a driver.
_HOMES = {
    "mailroom.commit": ("Outcome", "atomically", "atomically_async", "resolve", "resolve_async"),
    "mailroom.lamport": ("LamportClock", "Stamp"),
    "mailroom.links.links": ("AsyncLinks", "Links"),
    "mailroom.schema.drop": ("drop_inbox", "drop_inbox_async"),
    "mailroom.schema.inboxes": ("create_inbox", "create_inbox_async"),
    "mailroom.schema.rename": ("rename_inbox", "rename_inbox_async"),
    "mailroom.schema.subscriptions": ("subscribe", "subscribe_async", "unsubscribe", "unsubscribe_async"),
    "mailroom.settings": ("dsn",),
    "mailroom.topic": ("Topic",),
    "mailroom.watching": (
        *("Watched", "unwatch", "unwatch_async", "watch", "watch_async", "watched", "watched_async"),
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


warn_of_hidden()
