"""The schedule of a periodic message: for which times a message is sent by now, and which time is the next. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import UUID, uuid5

from mailroom.message.periodic import Missed
from mailroom.values.cron import cron

# A time is missed once its message is so late. The next leader takes over sooner, so no change of leaders misses one.
GRACE = timedelta(seconds=60)
MOST = 20  # messages of one schedule in one transaction, however many were missed


@dataclass(frozen=True, slots=True)
class Schedule:
    """When messages are sent, and what is done about times that were missed. The fields are `PeriodicMessage`'s."""

    name: str
    cron: str
    time_zone: str
    missed: Missed
    jitter_s: float

    def after(self, moment: datetime) -> datetime:
        """Return the next time after `moment`, in UTC. Raises `InvalidMessage`."""
        return cron(self.cron, self.time_zone).after(moment)

    def sent_at(self, due: datetime) -> datetime:
        """Return when the message of this time is sent. It depends on name and time alone, so all machines agree."""
        drawn = int.from_bytes(sha256(f"{self.name}:{due_text(due)}".encode()).digest()[:8]) / 2**64
        return due.astimezone(UTC) + timedelta(seconds=drawn * self.jitter_s)

    def by(self, due: datetime, now: datetime) -> tuple[list[datetime], datetime]:
        """Return the times for which a message is sent now, at most `MOST`, in order; and the next one after them.

        `due` is the first that is not done with. Each call returns a later one, if anything is to be sent.
        """
        due, now = due.astimezone(UTC), now.astimezone(UTC)  # sums of times in other zones would be wall times
        found: list[datetime] = []
        while len(found) < MOST and self.sent_at(due) <= now:
            is_missed = now - self.sent_at(due) > GRACE
            if is_missed and self.missed != "all":
                # The messages of all times up to then are to be sent by now, whatever their delay; or are missed, too.
                until = now - timedelta(seconds=self.jitter_s) - (GRACE if self.missed == "skip" else timedelta())
                due = cron(self.cron, self.time_zone).latest(due, max(due, until))
            if not is_missed or self.missed != "skip":
                found.append(due)
            due = self.after(due)
        return found, due


def due_text(due: datetime) -> str:
    """Return a time as in the header `due`: ISO 8601, in UTC."""
    return due.astimezone(UTC).isoformat()


def message_id(node: UUID, name: str, due: datetime) -> UUID:
    """Return the id of the message of this time. It must never change, so that a consumer knows a message again."""
    return uuid5(node, f"{name}:{due_text(due)}")  # no name has a colon
