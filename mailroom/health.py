"""Whether what runs in a process is well: what probes ask, and what they are told."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

__all__ = ["Health"]


@dataclass(frozen=True, slots=True)
class Health:
    """How a lane or a worker is.

    `name` is dispatcher, executor, links, or that of a worker's inbox. `state` is what it does; `has_begun` whether it
    has worked since it was started. `why` says what is wrong, without values, and is None where it is `ready`. `since`
    is when `state` began, by this machine's clock.
    """

    name: str
    state: str
    ready: bool
    has_begun: bool
    since: datetime
    why: str | None = None


class Probed(Protocol):
    """A lane or a worker."""

    def health(self) -> Health:
        """Return how it is; asks no database, and may be called from any thread."""
