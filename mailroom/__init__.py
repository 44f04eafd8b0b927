"""Mailroom: transactional messaging inside PostgreSQL. What the writer's and the consumer's side agree on."""

from typing import TYPE_CHECKING, Any

from mailroom.errors import CommitUnknown, NotAtomic, TokenExpired
from mailroom.message.carry import carrying
from mailroom.packages.installed import warn_of_hidden
from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from mailroom.bridges.bridges import AsyncBridges, Bridges
    from mailroom.links.links import AsyncLinks, Links
    from mailroom.message.topic import Topic
    from mailroom.order.lamport import LamportClock, Stamp
    from mailroom.registry.drop import drop_inbox, drop_inbox_async
    from mailroom.registry.inboxes import create_inbox, create_inbox_async, set_inbox, set_inbox_async
    from mailroom.registry.logs import create_log, create_log_async, drop_log, drop_log_async, set_log, set_log_async
    from mailroom.registry.rename import rename_inbox, rename_inbox_async
    from mailroom.registry.subscriptions import subscribe, subscribe_async, unsubscribe, unsubscribe_async
    from mailroom.schema.watching import Watched, unwatch, unwatch_async, watch, watch_async, watched, watched_async
    from mailroom.session.commit import Outcome, atomically, atomically_async, resolve, resolve_async
    from mailroom.session.settings import dsn

__version__ = "0.1.0"

__all__ = [
    "AsyncBridges",
    "AsyncLinks",
    "Bridges",
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
    "create_log",
    "create_log_async",
    "drop_inbox",
    "drop_inbox_async",
    "drop_log",
    "drop_log_async",
    "dsn",
    "rename_inbox",
    "rename_inbox_async",
    "resolve",
    "resolve_async",
    "set_inbox",
    "set_inbox_async",
    "set_log",
    "set_log_async",
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

# Imported on demand: an import of any module of the package imports this one, and should not load a driver.
_HOMES = {
    "mailroom.session.commit": ("Outcome", "atomically", "atomically_async", "resolve", "resolve_async"),
    "mailroom.order.lamport": ("LamportClock", "Stamp"),
    "mailroom.bridges.bridges": ("AsyncBridges", "Bridges"),
    "mailroom.links.links": ("AsyncLinks", "Links"),
    "mailroom.registry.drop": ("drop_inbox", "drop_inbox_async"),
    "mailroom.registry.inboxes": ("create_inbox", "create_inbox_async", "set_inbox", "set_inbox_async"),
    "mailroom.registry.logs": (
        *("create_log", "create_log_async", "drop_log", "drop_log_async", "set_log", "set_log_async"),
    ),
    "mailroom.registry.rename": ("rename_inbox", "rename_inbox_async"),
    "mailroom.registry.subscriptions": ("subscribe", "subscribe_async", "unsubscribe", "unsubscribe_async"),
    "mailroom.session.settings": ("dsn",),
    "mailroom.message.topic": ("Topic",),
    "mailroom.schema.watching": (
        *("Watched", "unwatch", "unwatch_async", "watch", "watch_async", "watched", "watched_async"),
    ),
}


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)


warn_of_hidden()
