"""What a dialog says of the archive: which of the messages that would be discarded it keeps."""

from collections.abc import Collection, Mapping

from mailroom.cli.acting import counted
from mailroom.figures.parked_keys import Keeping

NAMED = 5


def kept(keeping: Mapping[str, Keeping], inboxes: Collection[str]) -> str:
    """Return a sentence about what is discarded from these inboxes, '' if none of them has an archive."""
    having = sorted(set(inboxes) & keeping.keys())
    if not having:
        return ""
    if len(set(inboxes)) == 1:
        each = keeping[having[0]]
        replays = ", and can replay it" if each.replays else ""
        return f"The archive of {each.inbox} keeps what is discarded for {counted(each.days, 'day')}{replays}."
    names = ", ".join(having[:NAMED]) + (f" and {len(having) - NAMED:,} more" if len(having) > NAMED else "")
    lacks = "" if set(inboxes) <= keeping.keys() else " What is discarded from the others is gone for good."
    return f"What is discarded from these inboxes is kept by their archive: {names}.{lacks}"
