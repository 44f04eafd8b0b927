"""Links: messages from node to node, each in a database of its own."""

from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from mailroom.links.links import AsyncLinks, Links, Removed
    from mailroom.links.resume import LinkMoved, LinkReport, Resumed
    from mailroom.links.states import LinkStates, ReaderState, SourceState

__all__ = [
    "AsyncLinks",
    "LinkMoved",
    "LinkReport",
    "LinkStates",
    "Links",
    "ReaderState",
    "Removed",
    "Resumed",
    "SourceState",
]

# Imported on demand: what stands below imports other modules of this package.
_HOMES = {
    "mailroom.links.links": ("AsyncLinks", "Links", "Removed"),
    "mailroom.links.resume": ("LinkMoved", "LinkReport", "Resumed"),
    "mailroom.links.states": ("LinkStates", "ReaderState", "SourceState"),
}


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
