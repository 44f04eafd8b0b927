"""`Periodic` and `AsyncPeriodic`: which periodic messages there are. The dispatcher sends them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from mailroom.errors import ConfigurationError, InvalidMessage, UnknownPeriodic
from mailroom.message.outgoing import aware
from mailroom.message.periodic import PeriodicMessage, columns
from mailroom.schema import acts
from mailroom.schema.audit import auditing, differences
from mailroom.schema.checks import checking
from mailroom.schema.node import OfNode, beginning_act
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import Operation, Row, Sql
from mailroom.values.cron import cron
from mailroom.values.names import meant, periodic_name, shown
from mailroom.values.numbers import count
from outbox.periodic.schedule import Schedule

Put: TypeAlias = Literal["added", "changed", "unchanged"]


@dataclass(frozen=True, slots=True)
class PeriodicState:
    """A periodic message as it stands: `next_at` is when its next message is sent, for the time `due_at`.

    `last_at` is the last time for which a message was sent, None for none yet. `last_error` says why the last try
    failed; it is tried again.
    """

    name: str
    cron: str
    time_zone: str
    topic: str
    key: str | None
    kind: str
    missed: str
    jitter_s: float
    due_at: datetime
    next_at: datetime
    last_at: datetime | None
    paused: bool
    last_error: str | None


NOW = Sql("SELECT coalesce(%(now)s::timestamptz, clock_timestamp())", columns=("timestamptz",))
HOLD = Sql(
    """
SELECT name, cron, time_zone, missed, jitter_s, due_at, paused FROM {schema}.periodic WHERE name = %(name)s::text
FOR NO KEY UPDATE
""",
    columns={
        "name": "text",
        "cron": "text",
        "time_zone": "text",
        "missed": "text",
        "jitter_s": "float8",
        "due_at": "timestamptz",
        "paused": "boolean",
    },
)
FIND = Sql(
    "SELECT name, cron, time_zone FROM {schema}.periodic WHERE name = %(name)s::text", columns=("text", "text", "text")
)
# The columns that define it, in the order of `columns`.
GIVEN = {
    "name": "%(name)s::text",
    "cron": "%(cron)s::text",
    "topic": "%(topic)s::text",
    "value": "%(value)s::bytea",
    "key": "%(key)s::text",
    "headers": "%(headers)s::text::jsonb",
    "kind": '%(kind)s::text::"char"',
    "time_zone": "%(time_zone)s::text",
    "missed": "%(missed)s::text",
    "jitter_s": "%(jitter_s)s::float8",
}
SHOWN = ("cron", "time_zone", "topic", "key", "kind", "missed", "jitter_s")
NAMES, VALUES = ", ".join(GIVEN), ", ".join(GIVEN.values())
# Several programs may add the same at once, each at its start: the second one waits for the first here.
ADD = Sql(
    """
INSERT INTO {schema}.periodic ({names}, due_at, next_at)
VALUES ({values}, %(due_at)s::timestamptz, %(next_at)s::timestamptz)
ON CONFLICT DO NOTHING RETURNING true
""",
    columns=("boolean",),
    names=NAMES,
    values=VALUES,
)
OTHERWISE = Sql(
    "SELECT true FROM {schema}.periodic WHERE name = %(name)s::text AND ({names}) IS DISTINCT FROM ROW ({values})",
    columns=("boolean",),
    names=NAMES,
    values=VALUES,
)
CHANGE = Sql(
    """
UPDATE {schema}.periodic SET ({names}) = ROW ({values}),
    due_at = %(due_at)s::timestamptz, next_at = %(next_at)s::timestamptz, last_error = NULL
WHERE name = %(name)s::text
""",
    names=NAMES,
    values=VALUES,
)
LIST = Sql(
    """
SELECT name, cron, time_zone, topic, key, kind::text, missed, jitter_s, due_at, next_at, last_at, paused, last_error
FROM {schema}.periodic ORDER BY name
""",
    columns=(
        *("text", "text", "text", "text", "text", "text", "text", "float8"),
        *("timestamptz", "timestamptz", "timestamptz", "boolean", "text"),
    ),
)
PAUSE = Sql("UPDATE {schema}.periodic SET paused = true WHERE name = %(name)s::text")
RESUME = Sql(
    """
UPDATE {schema}.periodic
SET paused = false, due_at = %(due_at)s::timestamptz, next_at = %(next_at)s::timestamptz, last_error = NULL
WHERE name = %(name)s::text
"""
)
REMOVE = Sql("DELETE FROM {schema}.periodic WHERE name = %(name)s::text")


class _Operations(OfNode):
    """What both classes do, as operations."""

    def _add(
        self, message: PeriodicMessage, *, actor: str, why: str | None = None, now: datetime | None = None
    ) -> Operation[Put]:
        """Add a periodic message; return `added`, or `unchanged` if it is there as defined.

        Its first time is the next one of its cron. Raises `ConfigurationError` if there is one of its name that is
        defined otherwise: `set` changes it.
        """
        yield from beginning_act(self.schema, actor, why)
        done, was = yield from self._putting(message, now, changes=False)
        if done == "changed":
            raise ConfigurationError(
                f"There is a periodic message {message.name}, and it stays as it is: {was} would change. To change it: "
                f"mailroom periodic set {message.name}, or Periodic.set.",
                code="MR-periodic-set-otherwise",
            )
        yield from self._auditing(message.name, done, was, actor, why)
        return done

    def _set(
        self, message: PeriodicMessage, *, actor: str, why: str | None = None, now: datetime | None = None
    ) -> Operation[str]:
        """Give the periodic message of this name this definition; return what is different, such as `cron a -> b`.

        The text is empty if it has this definition. A change that leaves cron and time zone as they are leaves the next
        time as it is. A paused one stays paused.
        """
        yield from beginning_act(self.schema, actor, why)
        yield from self._holding(message.name)
        done, change = yield from self._putting(message, now)
        yield from self._auditing(message.name, done, change, actor, why)
        return change

    def _sync(
        self,
        messages: Iterable[PeriodicMessage],
        *,
        actor: str,
        why: str | None = None,
        now: datetime | None = None,
    ) -> Operation[dict[str, Put]]:
        """`add` or `set` all that a program declares, when it starts; return by name what was done.

        Any number of processes may do it at once: a definition is added, and written to the audit, once. What is not
        declared here stays, since other programs of the node declare theirs: end it with `remove`.
        """
        declared: dict[str, PeriodicMessage] = {}
        for message in messages:
            if not isinstance(message, PeriodicMessage):
                raise InvalidMessage(
                    f"It is a {type(message).__name__}: give a PeriodicMessage, such as Topic.periodic returns.",
                    code="MR-invalid-argument",
                )
            if declared.setdefault(message.name, message) is not message:
                raise InvalidMessage(
                    f"The periodic message {message.name} is declared twice: give each a name of its own.",
                    code="MR-invalid-argument",
                )
        yield from beginning_act(self.schema, actor, why)
        done: dict[str, Put] = {}
        for name in sorted(declared):  # in the same order everywhere, so that two of these cannot deadlock
            done[name], was = yield from self._putting(declared[name], now)
            yield from self._auditing(name, done[name], was, actor, why)
        return done

    def _auditing(self, name: str, done: Put, was: str, actor: str, why: str | None) -> Operation[None]:
        if done != "unchanged":
            act = acts.PERIODIC_ADD if done == "added" else acts.PERIODIC_SET
            yield from auditing(self.schema, act, [(None, name, 0)], actor, why, was or None)

    def _list(self) -> Operation[list[PeriodicState]]:
        """Return all periodic messages, by name, without their values and headers."""
        yield from checking(self.schema)
        return [PeriodicState(*row) for row in (yield LIST.at(schema=self.schema)())]

    def _pause(self, name: str, *, actor: str, why: str | None = None) -> Operation[bool]:
        """Send no more messages of this one until it is resumed; return whether that changes anything."""
        yield from beginning_act(self.schema, actor, why)
        *_, is_paused = yield from self._holding(name)
        if is_paused:
            return False
        yield PAUSE.at(schema=self.schema)(name=name)
        yield from auditing(self.schema, acts.PERIODIC_PAUSE, [(None, name, 0)], actor, why)
        return True

    def _resume(self, name: str, *, actor: str, why: str | None = None, now: datetime | None = None) -> Operation[bool]:
        """Send messages of a paused one again; return whether it was paused.

        For times that passed meanwhile nothing is sent, whatever `missed` says: it was paused on purpose.
        """
        yield from beginning_act(self.schema, actor, why)
        *fields, due, is_paused = yield from self._holding(name)
        if not is_paused:
            return False
        schedule, moment = Schedule(*fields), (yield from self._now(now))
        if due <= moment:
            due = schedule.after(moment)
        yield RESUME.at(schema=self.schema)(name=name, due_at=due, next_at=schedule.sent_at(due))
        yield from auditing(self.schema, acts.PERIODIC_RESUME, [(None, name, 0)], actor, why)
        return True

    def _remove(self, name: str, *, actor: str, why: str | None = None) -> Operation[None]:
        """End a periodic message. What was sent stays sent."""
        yield from beginning_act(self.schema, actor, why)
        yield from self._holding(name)
        yield REMOVE.at(schema=self.schema)(name=name)
        yield from auditing(self.schema, acts.PERIODIC_REMOVE, [(None, name, 0)], actor, why)

    def _next_times(self, name: str, number: int = 10, *, now: datetime | None = None) -> Operation[list[datetime]]:
        """Return the next `number` times of a periodic message, in its time zone, as if it were not paused.

        They are the times that it is due, without the delay by its jitter.
        """
        number = count(number, "number")
        yield from checking(self.schema)
        _, expression, time_zone, *_ = yield from self._finding(name)
        times = cron(expression, time_zone)
        found = [times.after((yield from self._now(now)))]
        while len(found) < number:
            found.append(times.after(found[-1]))
        return [each.astimezone(times.zone) for each in found]

    def _putting(
        self, message: PeriodicMessage, now: datetime | None, *, changes: bool = True
    ) -> Operation[tuple[Put, str]]:
        """Add the message, or give the one of its name this definition; return which, and what is different.

        Without `changes` one that is defined otherwise stays as it is.
        """
        given = dict(zip(GIVEN, columns(message), strict=True))
        schedule = Schedule(message.name, message.cron, message.time_zone, message.missed, message.jitter_s)
        while not (held := (yield HOLD.at(schema=self.schema)(name=message.name))):
            due = schedule.after((yield from self._now(now)))
            if (yield ADD.at(schema=self.schema)(**given, due_at=due, next_at=schedule.sent_at(due))):
                return "added", ""  # else another program has added it since, and may have ended it again
        [old] = HOLD.named(held)
        due = old.due_at
        [before] = [each for each in (yield from self._list()) if each.name == message.name]
        if (old.cron, old.time_zone) != (message.cron, message.time_zone):
            due = schedule.after((yield from self._now(now)))
        if not (yield OTHERWISE.at(schema=self.schema)(**given)):
            return "unchanged", ""
        if changes:
            yield CHANGE.at(schema=self.schema)(**given, due_at=due, next_at=schedule.sent_at(due))
        return "changed", _differences(before, message)

    def _holding(self, name: str) -> Operation[Row]:
        rows: list[Row] = yield HOLD.at(schema=self.schema)(name=periodic_name(name))
        return (yield from self._only(rows, name))

    def _finding(self, name: str) -> Operation[Row]:
        rows: list[Row] = yield FIND.at(schema=self.schema)(name=periodic_name(name))
        return (yield from self._only(rows, name))

    def _only(self, rows: list[Row], name: str) -> Operation[Row]:
        if not rows:
            near = meant(name, [each.name for each in (yield from self._list())])
            raise UnknownPeriodic(f"There is no periodic message {shown(name)}.{near} See: mailroom periodic list")
        return rows[0]

    def _now(self, now: datetime | None) -> Operation[datetime]:
        [(moment,)] = yield NOW.at()(now=None if now is None else aware(now, "now"))
        return moment  # type: ignore[no-any-return]


def _differences(before: PeriodicState, after: PeriodicMessage) -> str:
    """Return what is different, such as `cron @daily -> @hourly`; of values and headers that they are."""
    was, now = ({name: getattr(each, name) for name in SHOWN} for each in (before, after))
    return differences(was, now) or "its value or headers"


class Periodic(_Operations):
    """The periodic messages of a node. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`, works in the caller's
    transaction and never commits. `actor` says who acts and `why` gives the reason; both are written to the table
    `audit`. `now` takes the place of the database's clock.

    The dispatcher sends each message in the transaction that moves the row on to its next time: exactly one for each
    time, however many dispatchers run, restart or die.

    Raises `UnknownPeriodic`, `InvalidName`, `InvalidMessage`, `ConfigurationError`, and `NotInTransaction` on an
    autocommit connection outside a transaction.
    """

    add = on_connection(_Operations._add)
    set = on_connection(_Operations._set)
    sync = on_connection(_Operations._sync)
    list = on_connection(_Operations._list)
    pause = on_connection(_Operations._pause)
    resume = on_connection(_Operations._resume)
    remove = on_connection(_Operations._remove)
    next_times = on_connection(_Operations._next_times)


class AsyncPeriodic(_Operations):
    """`Periodic` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    add = on_async_connection(_Operations._add)
    set = on_async_connection(_Operations._set)
    sync = on_async_connection(_Operations._sync)
    list = on_async_connection(_Operations._list)
    pause = on_async_connection(_Operations._pause)
    resume = on_async_connection(_Operations._resume)
    remove = on_async_connection(_Operations._remove)
    next_times = on_async_connection(_Operations._next_times)
