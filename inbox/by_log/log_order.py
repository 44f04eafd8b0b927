"""The order of an inbox that reads a log: by key, as the log has its messages; what fails goes on in a queue per
key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

from inbox.by_key import failure
from inbox.by_key.claim import Claimed, Course, Share, reaping_any
from inbox.by_key.failure import Failed, Recorded
from inbox.by_key.key_order import KeyOrder
from inbox.by_log.lanes import Lanes
from inbox.by_log.log_claim import reaping_log
from inbox.by_log.log_entries import BY_LANE
from inbox.by_log.log_failure import RECORD, SUSPECT, THERE
from inbox.by_log.log_peek import counting, peeking
from mailroom.errors import ConfigurationError
from mailroom.message.message import Message
from mailroom.order.traits import OF_LOG, Traits
from mailroom.sql.operation import Operation, filled

# That a worker goes on in one transaction while it finds nothing that it may take. Then it commits: others wait for the
# lanes, and a rollback would have it look through all of that once more.
MOST_STEPS = 10


@dataclass(frozen=True, slots=True)
class LogCourse(Course):
    """What a claim leaves for the next one: of the inbox's own table, and of the lanes. `is_turn`: the log is next."""

    lanes: Lanes = field(default_factory=Lanes)
    is_turn: bool = False


@dataclass(frozen=True, slots=True)
class LogOrder(KeyOrder):
    """Messages are read from `log`, which has so many `lanes`; each key fails and is parked by itself, as by key.

    See `inbox.order.Order`. What is failing, parked or diverted is in the tables of an inbox by key, whose code does
    the rest.
    """

    traits: ClassVar[Traits] = OF_LOG

    log: str = ""
    lanes: int = 0

    @property
    def entries(self) -> Mapping[str, str]:
        """By the row of the message in its own table, or by the lane of its key."""
        return {
            name: sql.replace("{log}", self.log).replace("{lanes}", str(self.lanes)) for name, sql in BY_LANE.items()
        }

    def claiming(self, share: Share, course: Course) -> Operation[tuple[Claimed, Course]]:
        """Of the inbox's own table and of the log in turn, where both may have messages."""
        course = course if isinstance(course, LogCourse) else LogCourse()
        course = replace(course, lanes=replace(course.lanes, is_counted=False))
        has_diverted = has_looked = is_idle = False
        steps = 0
        while True:
            steps += 1
            # Where the log gives nothing the other table is looked at: an operator may have put something there.
            if (course.lanes.has_apart or is_idle) and not course.is_turn:
                has_looked = True
                apart, of_keys = yield from reaping_any(self.schema, self.inbox, share, course)
                course = replace(cast("LogCourse", of_keys), is_turn=True)
                if apart.messages:
                    return replace(apart, is_all=False, has_diverted=has_diverted), course
            claimed, known = yield from reaping_log(self.schema, self.inbox, self.log, self.lanes, share, course.lanes)
            course = replace(course, lanes=known, is_turn=False)
            has_diverted, is_idle = has_diverted or claimed.has_diverted, claimed.is_all
            is_enough = share.hold and steps == MOST_STEPS
            if claimed.messages or known.avoided or (claimed.is_all and has_looked) or is_enough:
                return replace(claimed, has_diverted=has_diverted), course

    def claiming_key(self, key: str, limit: int, course: Course) -> Operation[tuple[list[Message], Course]]:
        """It would have to pass messages of other keys of its lane."""
        raise ConfigurationError(
            f"Inbox {self.inbox!r} reads log {self.log!r}, in which no key can be read without others: take the next "
            "messages, whatever their keys, with reap_any (mailroom inbox reap --any).",
            code="MR-log-has-no-keys",
        )

    def recording(self, attempt: Failed) -> Operation[Recorded]:
        """The message's key waits, and no other."""
        return failure.recording(self.schema, self.inbox, attempt, RECORD, log=self.log, lanes=str(self.lanes))

    def suspecting(self, keys: Sequence[str], clocks: Sequence[int], error: str) -> Operation[None]:
        """Each key up to its last clock."""
        return failure.suspecting(
            self.schema, self.inbox, keys, clocks, error, SUSPECT, log=self.log, lanes=str(self.lanes)
        )

    def was_in_batch(self, key: str, clock: int, error: str) -> Operation[bool]:
        """By the failure of the message's key."""
        there = filled(THERE, lanes=self.lanes)
        return failure.was_in_batch(self.schema, self.inbox, key, clock, error, there=there)

    def peeking(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """Of both, by clock."""
        return peeking(self.schema, self.inbox, self.log, key, limit)

    def counting(self, key: str | None) -> Operation[int]:
        """Its own rows, and those of the log after the positions."""
        return counting(self.schema, self.inbox, self.log, key)
