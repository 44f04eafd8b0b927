"""What happens to a source that may have lost history: whether a link is in doubt, and when a new incarnation begins.

Pure decisions. If the source lost rows that a target has, the target writes a `Claim` and stops reading. The source
takes a new incarnation (`renewed`), which tells each reader to find out what both have
(`mailroom.links.handshake.diverged`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Claim:
    """What a target that has diverged has received: the last seq, and the largest clock."""

    seq: int
    clock: int


def is_in_doubt(matched: UUID | None, life: UUID) -> bool:
    """Return whether a link's reader still has to find its position in this life of the source."""
    return matched != life


@dataclass(frozen=True, slots=True)
class Renewal:
    """The source's new incarnation, and its new clock."""

    incarnation: int
    clock: int


def renewed(
    incarnation: int, clock: int, claims: Iterable[tuple[Claim, bool]], *, restored: bool = False, above: int = 0
) -> Renewal | None:
    """Return what the source becomes, None if it stays as it is.

    `claims` are those of its readers, each with whether its link is in doubt. The source takes a new incarnation if one
    of them is, or if an operator says so: `restored`, with `above`, an incarnation that readers have seen. A claim of a
    link that is not in doubt means a machine put back while it ran, changes by hand or an old primary, and proves
    nothing. The clock goes beyond every claim. Once renewed, the source forgets the claims: they are answered.
    """
    found = list(claims)
    if not restored and not any(in_doubt for _, in_doubt in found):
        return None
    return Renewal(max(incarnation, above) + 1, max([clock, *(claim.clock for claim, _ in found)]) + 1)
