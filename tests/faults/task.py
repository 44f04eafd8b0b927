"""What a child of the campaign is told when it is started."""

from dataclasses import asdict, dataclass
from typing import Any

READ_COMMITTED = "read committed"


@dataclass(frozen=True, slots=True)
class Habits:
    """What all the children of a stage have in common; bounds are shorter than as shipped, so that more happens."""

    lease_s: float = 1.0
    poll_s: float = 0.5
    ceiling_step: int = 5_000  # clocks; raised while we look, and not once in a campaign
    failing: float = 0.004  # the share of sound messages whose handler fails
    mutant: str = ""  # which rule is broken
    link_mutant: str = ""  # and which of links,
    bridge_mutant: str = ""  # and of bridges


USUAL = Habits()


@dataclass(frozen=True, slots=True)
class Task:
    """One role. `dsn` is the way it takes to the server, `direct` the straight one; `armed` is there from the start."""

    role: str
    name: str
    dsn: str
    direct: str
    home: str
    seed: int
    inbox: str
    pooled: bool
    pace: float  # messages a second of a writer
    habits: Habits
    isolation: str = READ_COMMITTED
    armed: tuple[str, str, str, int] | None = None

    def fields(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return asdict(self)


def told(fields: dict[str, Any]) -> Task:
    """Return the task of `Task.fields`."""
    return Task(**{**fields, "habits": Habits(**fields["habits"])})
