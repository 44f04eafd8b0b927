"""Mailroom: transactional messaging inside PostgreSQL. What the writer's and the consumer's side agree on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mailroom.carry import carrying
from mailroom.errors import CommitUnknown, NotAtomic, TokenExpired
from mailroom.packages import warn_of_hidden

if TYPE_CHECKING:
    from mailroom.commit import Outcome, atomically, atomically_async, resolve, resolve_async
    from mailroom.topic import Topic

__version__ = "0.1.0"

__all__ = [
    "CommitUnknown",
    "NotAtomic",
    "Outcome",
    "TokenExpired",
    "Topic",
    "atomically",
    "atomically_async",
    "carrying",
    "resolve",
    "resolve_async",
]


def __getattr__(name: str) -> Any:
    # Imported on demand: whoever imports any module of the package imports this one, and should not load a driver.
    if name in __all__:
        return getattr(import_module("mailroom.topic" if name == "Topic" else "mailroom.commit"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


warn_of_hidden()
