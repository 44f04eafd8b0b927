"""Bridges as users handle them: to which brokers this node publishes, and from which it takes in."""

from typing import Any, Unpack
from uuid import UUID

from mailroom.bridges.into import bridging_in, reading_ins, resuming_in, setting_in
from mailroom.bridges.out import bridging_out, finding_out, resuming_out, setting_out, skipping_row
from mailroom.bridges.record import Record
from mailroom.bridges.settings import BridgeSettings, InSettings, OutSettings
from mailroom.bridges.source import BrokerPosition
from mailroom.bridges.states import BridgeStates, cut_text, reading_bridges
from mailroom.bridges.waiting import LIMIT, waiting_records
from mailroom.errors import ConfigurationError, UnknownBridge
from mailroom.links.readers import LINK, removing_reader
from mailroom.links.resume import cutting
from mailroom.links.sources import removing_source
from mailroom.registry.subscriptions import Topics
from mailroom.schema import acts
from mailroom.schema.audit import check_actor
from mailroom.schema.checks import checking
from mailroom.schema.node import OfNode
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation
from mailroom.values.names import meant, node_name


class _Operations(OfNode):
    """What both classes do, as operations."""

    def _out(
        self,
        name: str,
        settings: OutSettings,
        *,
        actor: str,
        topics: Topics | None = None,
        keep_s: float | None = None,
        max_rows: int | None = None,
        why: str | None = None,
    ) -> Operation[bool]:
        """Publish messages of this node to a broker, by a bridge of this name; return whether it is new.

        `topics` are the topics and patterns that it publishes, by default `#`: all messages and events. Commands and
        replies of a topic go to it only if it is given the topic by its exact name and no inbox of this node gets them.
        What is sent after the caller's transaction has committed is published.

        What the broker has acknowledged is kept for `keep_s` seconds more (0). Once `max_rows` messages wait for it,
        the bridge is cut, and what waits is given up; by default, and with 0, any number may wait. A bridge of this
        name stays as it is: raises `ConfigurationError` if it has other settings, which `set` changes.
        """
        given = settings.flat() | {"topics": topics, "keep_s": keep_s, "max_rows": max_rows}
        return (yield from bridging_out(self.schema, name, given, actor=actor, why=why))

    def _into(self, name: str, settings: InSettings, *, actor: str, why: str | None = None) -> Operation[bool]:
        """Take in messages from a broker, by a bridge of this name; return whether it is new.

        Inboxes get them if they subscribe with the bridge's name as `origin`; one in total order cannot. A bridge of
        this name stays as it is: raises `ConfigurationError` if it has other settings, which `set` changes.
        """
        return (yield from bridging_in(self.schema, name, settings.flat(), actor=actor, why=why))

    def _set(
        self, name: str, *, actor: str, why: str | None = None, **settings: Unpack[BridgeSettings]
    ) -> Operation[str]:
        """Change settings of a bridge; return what is different now, such as `keep_s 0 -> 60`, or an empty text.

        Settings that are not given stay. The broker, `exactly_once` and `mark_topic` cannot be changed. A dispatcher
        begins anew with other settings, from where the bridge is. A recorded trouble stays until it has been tried with
        them; what has stopped since records are lost at the broker goes on only by `resume`.
        """
        given: dict[str, Any] = {each: value for each, value in settings.items() if value is not None}
        if unknown := given.keys() - BridgeSettings.__annotations__.keys():
            raise TypeError(f"No bridge has a setting {min(unknown)!r} that can be changed.")
        states = yield from self._begin(name, actor, why)
        is_in = name in {each.name for each in states.into}
        names = InSettings.names() if is_in else {*OutSettings.names(), *LINK}
        if foreign := sorted(given.keys() - names):
            way = "into" if is_in else "out of"
            raise ConfigurationError(
                f"{name} is a bridge {way} this node, which has no {' and no '.join(foreign)}.",
                code="MR-bridge-settings",
            )
        change = setting_in if is_in else setting_out
        return (yield from change(self.schema, name, given, actor=actor, why=why))

    def _status(self) -> Operation[BridgeStates]:
        """Return the state of the bridges."""
        return (yield from reading_bridges(self.schema))

    def _waiting(self, name: str, *, limit: int | None = LIMIT) -> Operation[list[Record]]:
        """Return the next records of a bridge, as they would be published; at most `limit` (100), None for all.

        Raises `Unencodable` for a message that has no record.
        """
        yield from checking(self.schema)
        return (yield from waiting_records(self.schema, (yield from finding_out(self.schema, name)), limit))

    def _cut(self, name: str, *, actor: str, why: str | None = None, dry_run: bool = False) -> Operation[int]:
        """Stamp nothing more for a bridge, and give up what waits for it; return how many messages that are.

        A cut bridge cannot go on: remove it, and make it again. The dispatcher deletes the rows.
        """
        yield from self._begin(name, actor, why)
        if (yield from reading_ins(self.schema, name)):
            raise ConfigurationError(
                f"{name} is a bridge into this node, for which nothing is stamped.", code="MR-bridge-settings"
            )
        return (yield from cutting(self.schema, name, actor=actor, why=why, dry_run=dry_run, act=acts.BRIDGE_CUT))

    def _resume(
        self, name: str, *, actor: str, at: BrokerPosition | None = None, why: str | None = None
    ) -> Operation[bool]:
        """Let a dispatcher try a stopped bridge at once; return whether it was stopped or failing.

        It is tried again by itself too, at least every 30 s; but not one that is cut, and one that is stopped since
        records are lost at the broker goes on only by this. With `at` a bridge into this node goes on there in that
        partition, whatever was read: what lies between is taken in again, or never.
        """
        states = yield from self._begin(name, actor, why)
        for each in states.out:
            if (each.name, each.state) == (name, "cut"):
                raise ConfigurationError(f"Bridge {name} is cut: {cut_text(name, each.max_rows)}", code="MR-bridge-cut")
        rows = yield from reading_ins(self.schema, name)
        if rows:
            return (yield from resuming_in(self.schema, rows[0], at, actor=actor, why=why))
        if at is not None:
            raise ConfigurationError(
                f"{name} is a bridge out of this node, and has no position at the broker.", code="MR-bridge-settings"
            )
        return (yield from resuming_out(self.schema, name, actor=actor, why=why))

    def _skip(self, name: str, row: int, *, actor: str, why: str | None = None) -> Operation[UUID]:
        """Let a row that waits for a bridge out go to `dead_letter`, and what is after it go on; return the message.

        `status` names the row that holds a bridge up. It may have been published already, if its answer was lost.
        """
        states = yield from self._begin(name, actor, why)
        if name in {each.name for each in states.into}:
            raise ConfigurationError(
                f"{name} is a bridge into this node, which has no rows to skip. To go on elsewhere: mailroom bridge "
                f"resume {name} --at TOPIC/PART=OFFSET",
                code="MR-bridge-settings",
            )
        return (yield from skipping_row(self.schema, name, row, actor=actor, why=why))

    def _remove(self, name: str, *, actor: str, why: str | None = None, dry_run: bool = False) -> Operation[int]:
        """Remove a bridge, and give up what waits for it; return how many messages that are.

        What it has published stays at the broker, and what it has taken in stays in inboxes. One that is made again
        begins anew: it takes in again what is still at the broker, with the same message ids.
        """
        yield from self._begin(name, actor, why)
        if (yield from reading_ins(self.schema, name)):
            yield from removing_source(self.schema, name, actor=actor, why=why, dry_run=dry_run, act=acts.BRIDGE_REMOVE)
            return 0
        return (
            yield from removing_reader(self.schema, name, actor=actor, why=why, dry_run=dry_run, act=acts.BRIDGE_REMOVE)
        )

    def _begin(self, name: str, actor: str, why: str | None) -> Operation[BridgeStates]:
        check_actor(actor, why)
        node_name(name)
        yield IN_TRANSACTION
        states = yield from reading_bridges(self.schema)
        known = {*(each.name for each in states.out), *(each.name for each in states.into)}
        if name not in known:
            raise UnknownBridge(f"This node has no bridge {name}.{meant(name, known)} See: mailroom bridge status")
        return states


class Bridges(_Operations):
    """The bridges of a node to brokers. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`, works in the caller's
    transaction and never commits; with `dry_run` it changes nothing and returns what it would. `actor` says who acts
    and `why` gives the reason; both are written to the table `audit`. A dispatcher does the work.

    Raises `UnknownBridge`, `InvalidName`, `ConfigurationError`, and `NotInTransaction` on an autocommit connection
    outside a transaction.
    """

    out = on_connection(_Operations._out)
    into = on_connection(_Operations._into)
    set = on_connection(_Operations._set)
    status = on_connection(_Operations._status)
    waiting = on_connection(_Operations._waiting)
    cut = on_connection(_Operations._cut)
    resume = on_connection(_Operations._resume)
    skip = on_connection(_Operations._skip)
    remove = on_connection(_Operations._remove)


class AsyncBridges(_Operations):
    """`Bridges` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    out = on_async_connection(_Operations._out)
    into = on_async_connection(_Operations._into)
    set = on_async_connection(_Operations._set)
    status = on_async_connection(_Operations._status)
    waiting = on_async_connection(_Operations._waiting)
    cut = on_async_connection(_Operations._cut)
    resume = on_async_connection(_Operations._resume)
    skip = on_async_connection(_Operations._skip)
    remove = on_async_connection(_Operations._remove)
