"""What is said of an executable: the message with its outcome, or the dead letter with the reason."""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import psycopg

from dispatcher.executor.fold import CompareFailed, Content, Refused, Rules, Taken, applied
from mailroom.errors import DecodeError, InvalidMessage
from mailroom.executable import NAMES as PARTS
from mailroom.executable import wired
from mailroom.message import parsed
from mailroom.sql.operation import Operation, Row, Sql
from mailroom.sql.sqlstate import BLAMES, meaning, sqlstate
from outbox.outbox import sending_many
from outbox.outgoing import EventType, Outgoing

Event: TypeAlias = EventType | None
Status: TypeAlias = Literal[200, 409, 500]
CARRIED = ("saga", "user", "tenant")  # headers that go on, as with every reply
UNTOLD = "what there is to say of it does not fit into a message"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an executable ended: 200 applied, 409 compared and found to differ, 500 refused.

    `event` tells what happened to the object: C created, U updated, D deleted, None nothing.
    """

    taken: Taken
    status: Status
    details: dict[str, object]
    event: Event = None

    @classmethod
    def of(cls, taken: Taken, before: Content | None, after: Content | None) -> "Outcome":
        """Return how a put, an increment or a delete ended that was applied."""
        if after is None:
            deleted = before is not None
            return cls(taken, 200, {"outcome": "applied", "deleted": int(deleted)}, "D" if deleted else None)
        details: dict[str, object] = {"outcome": "applied"}
        if taken.operation == "increment":
            details["number"] = after.number
        return cls(taken, 200, details, "C" if before is None else "U")

    @classmethod
    def of_call(cls, taken: Taken, result: str | None) -> "Outcome":
        """Return how a call ended that returned this JSON."""
        try:
            details = {"outcome": "applied", "result": None if result is None else parsed(result)}
        except DecodeError:
            details = {"outcome": "applied", "reason": UNTOLD}
        return cls(taken, 200, details)

    def row(self) -> Row:
        """Return the row of the message that tells it; of what no message can hold, only that it came to something."""
        brief = replace(self, details={"outcome": self.details["outcome"], "reason": UNTOLD})
        for outcome in (self, brief):
            with suppress(InvalidMessage):
                return outcome.message().row()
        return brief.message(carried=()).row()  # the headers it came with leave no room for ours

    def message(self, carried: Collection[str] = CARRIED) -> Outgoing:
        """Return the message that tells it. `InvalidMessage` is raised when its row is asked for."""
        taken = self.taken
        headers = json.loads(taken.headers or "{}")
        return Outgoing(
            str(taken.notify),
            {"operation": taken.operation, "target": taken.target, "key": taken.key, **self.details},
            taken.key or taken.message_id,
            {name: headers[name] for name in carried if name in headers}
            | {"correlation": str(taken.message_id), "status": str(self.status)},
            kind="R",
            message_type="O",
            event_type=self.event,
            after_clock=taken.after_clock,
        )


@dataclass(slots=True)
class Done:
    """What applying executables came to; `count` is how many that were."""

    count: int = 0
    dead: list[tuple[Taken, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def refuse(self, taken: Taken, reason: str) -> None:
        """Note that one cannot be applied."""
        self.dead.append((taken, reason))
        if taken.fault is None:  # else there may be no topic that could be told
            self.outcomes.append(Outcome(taken, 500, {"outcome": "refused", "reason": reason}))

    def apply(self, taken: Taken, held: Content | None, rules: Rules) -> tuple[Content | None, bool]:
        """Note what a put, an increment or a delete comes to; return what the key then holds, and if it was applied."""
        try:
            now = applied(taken, held, rules)
        except CompareFailed as failed:
            if taken.notify is None:
                self.refuse(taken, str(failed))
            else:
                self.outcomes.append(Outcome(taken, 409, {"outcome": "compare failed", "found": failed.found}))
        except Refused as refusal:
            self.refuse(taken, str(refusal))
        else:
            if taken.notify:
                self.outcomes.append(Outcome.of(taken, held, now))
            return now, True
        return held, False

    def add(self, other: "Done") -> None:
        """Take what else was done."""
        self.count += other.count
        self.dead += other.dead
        self.outcomes += other.outcomes


def telling(schema: str, outcomes: Sequence[Outcome]) -> Operation[int]:
    """Send the messages of outcomes that somebody is to be told; returns how many."""
    return (yield from sending_many(schema, [each.row() for each in outcomes if each.taken.notify]))


DEAD_LETTER = Sql(
    """
INSERT INTO {schema}.dead_letter (stage, reason, message_id, topic, key, kind, message_type, value, headers,
                                  after_clock, source, sent_at)
SELECT 'execute', reason, message_id, topic, key, 'M', 'U', value, headers::jsonb, after_clock, source, sent_at
FROM unnest(%(reason)s::text[], %(message_id)s::uuid[], %(topic)s::text[], %(key)s::text[], %(value)s::bytea[],
            %(headers)s::text[], %(after_clock)s::bigint[], %(source)s::text[], %(sent_at)s::timestamptz[])
     WITH ORDINALITY AS d (reason, message_id, topic, key, value, headers, after_clock, source, sent_at, nth)
ORDER BY nth
"""
)


def dead_lettering_executables(schema: str, dead: Sequence[tuple[Taken, str]]) -> Operation[None]:
    """Put executables that could not be applied among the dead letters, each with its reason."""
    if not dead:
        return
    taken = [each for each, _ in dead]
    yield DEAD_LETTER.at(schema=schema)(
        reason=[reason for _, reason in dead],
        message_id=[each.message_id for each in taken],
        topic=[f"{each.target}.{each.operation}" for each in taken],
        key=[each.key or str(each.message_id) for each in taken],
        value=[wired({name: getattr(each, name) for name in PARTS}) for each in taken],
        headers=[each.headers for each in taken],
        after_clock=[each.after_clock for each in taken],
        source=[each.source for each in taken],
        sent_at=[each.sent_at for each in taken],
    )


def reason_of(error: Exception) -> str | None:
    """Return why an executable failed, without anything of its content; None if it is not to blame."""
    # Also of XX000, which extensions raise for what they do not like, and of 55000, a sequence not yet used.
    return described(error) if sqlstate(error) and meaning(error) in BLAMES else None


def described(error: Exception) -> str:
    """Return what an error of the database is, without anything of the executable's content."""
    code = sqlstate(error)
    if not isinstance(error, psycopg.Error):
        error = getattr(error, "orig", error)
    diag = getattr(error, "diag", None)
    names = (diag.constraint_name, diag.table_name, diag.column_name) if diag is not None else ()
    # The text of an error repeats values; that of RAISE is its author's own.
    told = diag.message_primary if diag is not None and code == "P0001" else None
    return " ".join(part for part in (f"{type(error).__name__} ({code})", *names, told) if part)
