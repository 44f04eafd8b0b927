"""Links as users handle them: who may read this node, which nodes it reads, and the state of each link."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mailroom.errors import ConfigurationError, MailroomError, UnknownLink
from mailroom.links.readers import allowing, link_settings, removing_reader, setting_reader
from mailroom.links.resume import LOST_AT_MOST, LinkMoved, LinkReport, Resumed, cutting, moving, reporting, resuming
from mailroom.links.sources import (
    adding,
    excluding,
    including,
    removing_source,
    setting_source,
    source_settings,
)
from mailroom.links.states import LinkStates, reading_states
from mailroom.links.told import waiting_told
from mailroom.links.unknown import unknown_link
from mailroom.order.total import resuming_order
from mailroom.registry.subscriptions import Topics, topic_texts
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.schema.checks import checking
from mailroom.schema.node import OfNode, beginning_act
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import inbox_name, node_name
from mailroom.values.numbers import count_or_all

Side: TypeAlias = Literal["reader", "source"]


@dataclass(frozen=True, slots=True)
class Removed:
    """Which link was removed: `side` says whether the other node was a reader of this one or its source.

    `given_up` counts the messages that were stamped for the reader and not acknowledged by it.
    """

    name: str
    side: Side
    given_up: int


BRIDGE = Sql(
    """
SELECT EXISTS (SELECT FROM {schema}.link AS l JOIN {schema}.bridge_out AS b ON b.link = l.number
               WHERE l.name = %(name)s::text)
    OR EXISTS (SELECT FROM {schema}.origin AS o JOIN {schema}.bridge_in AS b ON b.origin = o.number
               WHERE o.name = %(name)s::text)
""",
    columns=("boolean",),
)


class _Operations(OfNode):
    """What both classes do, as operations."""

    def _allow(
        self,
        reader: str,
        *,
        actor: str,
        topics: Topics | None = None,
        keep_s: float | None = None,
        max_rows: int | None = None,
        why: str | None = None,
    ) -> Operation[bool]:
        """Allow the node `reader` to read this one; return whether that is new.

        What the reader subscribes to is stamped for it from the moment it has asked for it. `topics` are the topics and
        patterns that it may ask for; by default, and with `#`, all messages and events. Commands and replies of a topic
        go to a reader only if it is allowed the topic by its exact name and no inbox of this node gets them. If there
        are several such readers, the one that was allowed first gets them, whatever the others ask for.

        What the reader has acknowledged is kept for `keep_s` seconds more (172,800: two days), in case its database is
        put back in time. Once `max_rows` messages wait for it, the link is cut, and what waits is given up; by default,
        and with 0, any number may wait. A reader that is allowed already stays as it is: raises `ConfigurationError`
        if it has another setting than one that is given, which `set` changes.
        """
        given = link_settings(topics, keep_s, max_rows)
        return (yield from allowing(self.schema, reader, given, actor=actor, why=why))

    def _add(
        self,
        source: str,
        *,
        actor: str,
        service: str | None = None,
        reader: str | None = None,
        source_schema: str | None = None,
        why: str | None = None,
    ) -> Operation[bool]:
        """Read the node `source` from now on; return whether that is new.

        `service` is the entry of libpq's service file that leads there; without one the dispatcher takes the variable
        MAILROOM_DSN_<SOURCE> of its environment. `reader` is the name under which the source allows this node, by
        default this node's own name, and `source_schema` the schema of the source in its database (mailroom). A source
        that is read already stays as it is: raises `ConfigurationError` if it has another setting than one that is
        given, which `set` changes.
        """
        given = source_settings(service, reader, source_schema)
        return (yield from adding(self.schema, source, given, actor=actor, why=why))

    def _set(
        self,
        name: str,
        *,
        actor: str,
        topics: Topics | None = None,
        keep_s: float | None = None,
        max_rows: int | None = None,
        service: str | None = None,
        reader: str | None = None,
        source_schema: str | None = None,
        why: str | None = None,
    ) -> Operation[str]:
        """Change settings of a link; return what is different now, such as `keep_s 60 -> 0`, or an empty text.

        `topics`, `keep_s` and `max_rows` are those of a node that reads this one, as for `allow`; `service`, `reader`
        and `source_schema` those of a node that this one reads, as for `add`. So what is given says which of the two
        links is meant. What is not given stays; an empty `service` ends it. `reader` and `source_schema` cannot change
        once the source was reached.
        """
        of_reader = link_settings(topics, keep_s, max_rows)
        of_source = source_settings(service or None, reader, source_schema)
        if service == "":
            of_source["service"] = None
        if bool(of_reader) is bool(of_source):
            raise ConfigurationError(
                "Give settings of one link: topics, keep_s and max_rows are those of a reader of this node; service, "
                "reader (--as) and source_schema those of a source.",
                code="MR-arguments-conflict",
            )
        yield from beginning_act(self.schema, actor, why)
        yield from self._no_bridge(name, "set")
        if of_reader:
            return (yield from setting_reader(self.schema, name, of_reader, actor=actor, why=why))
        return (yield from setting_source(self.schema, name, of_source, actor=actor, why=why))

    def _status(self) -> Operation[LinkStates]:
        """Return the state of the links: of the nodes that read this one, and of those that it reads."""
        return (yield from reading_states(self.schema))

    def _wait(
        self, inbox: str, *, origin: str | None = None, topics: Topics | None = None, timeout_s: float = 60.0
    ) -> Operation[None]:
        """Wait until the sources know the subscriptions of an inbox to their messages, at most `timeout_s` seconds.

        What is sent at a source after that comes. With `origin` and `topics` it waits only for those subscriptions.
        Call it after the transaction that subscribed has committed, and outside of a REPEATABLE READ one. Raises
        `NotSubscribed`, which says why, at once if a source refuses the topic; the subscription stays.
        """
        texts = None if topics is None else topic_texts(topics)
        return (yield from waiting_told(self.schema, inbox_name(inbox), origin, texts, timeout_s))

    def _remove(
        self, name: str, *, actor: str, side: Side | None = None, why: str | None = None, dry_run: bool = False
    ) -> Operation[Removed]:
        """Remove the link to the node `name`, on this side only.

        With a reader, its topics and what waits for it go too. With a source, all records of what came from it go; what
        is in inboxes stays. If the other node is both, `side` says which of the two is meant. A reader that is allowed
        again has another link, which begins with what is stamped then.
        """
        check_actor(actor, why)
        node_name(name)
        yield IN_TRANSACTION
        yield from self._no_bridge(name, "remove")
        found = yield from self._side(name, side)
        if found == "reader":
            given_up = yield from removing_reader(self.schema, name, actor=actor, why=why, dry_run=dry_run)
            return Removed(name, found, given_up)
        yield from removing_source(self.schema, name, actor=actor, why=why, dry_run=dry_run)
        return Removed(name, found, 0)

    def _side(self, name: str, side: Side | None) -> Operation[Side]:
        if side is not None:
            return side
        states = yield from reading_states(self.schema)
        reads = any(each.name == name for each in states.readers)
        is_read = any(each.name == name for each in states.sources)
        if reads and is_read:
            raise MailroomError(
                f"{name} reads this node and is read by it. Say which link is meant: mailroom link remove {name} "
                f"--reader, or --source",
                code="MR-link-both-ways",
            )
        if not reads and not is_read:
            raise (yield from unknown_link(self.schema, name, f"No node {name} reads this one or is read by it."))
        return "reader" if reads else "source"

    def _exclude(self, source: str, *, actor: str, why: str | None = None, dry_run: bool = False) -> Operation[bool]:
        """Read this source no longer until it is included again; return whether that changes anything.

        Inboxes in total order no longer wait for it. From then on nodes may have different sets of its messages.
        """
        return (yield from excluding(self.schema, source, actor=actor, why=why, dry_run=dry_run))

    def _include(self, source: str, *, actor: str, why: str | None = None) -> Operation[bool]:
        """Read an excluded source again; return whether it was excluded. It goes on where it was.

        What inboxes in total order have already passed goes to `dead_letter`.
        """
        return (yield from including(self.schema, source, actor=actor, why=why))

    def _cut(self, reader: str, *, actor: str, why: str | None = None, dry_run: bool = False) -> Operation[int]:
        """Stamp nothing more for a reader, and give up what waits for it; return how many messages that are.

        A cut link cannot go on: remove it, and allow the reader again. The dispatcher deletes the rows.
        """
        yield from beginning_act(self.schema, actor, why)
        yield from self._no_bridge(reader, "cut")
        return (yield from cutting(self.schema, node_name(reader), actor=actor, why=why, dry_run=dry_run))

    def _resume(
        self, source: str, *, actor: str, at: int | None = None, why: str | None = None, dry_run: bool = False
    ) -> Operation[Resumed]:
        """Read a stopped source again; with `at`, go on after that row of its link, whatever was received.

        Messages that are known to have come from later rows are left out when they come again. Raises `MailroomError`
        for a source that is excluded.
        """
        yield from beginning_act(self.schema, actor, why)
        yield from self._no_bridge(source, "resume")
        return (yield from resuming(self.schema, node_name(source), at, actor=actor, why=why, dry_run=dry_run))

    def _resume_order(self, *, actor: str, why: str | None = None) -> Operation[bool]:
        """Let this node's total inboxes go on, which stand since it lost history; return whether they stood.

        What it lost and stamps again has its old place at other nodes, and a later one here. `resume` does it too.
        """
        yield from beginning_act(self.schema, actor, why)
        resumed = yield from resuming_order(self.schema)
        if resumed:
            yield from auditing(self.schema, acts.LINK_RESUME, [(None, None, 0)], actor, why, "total order goes on")
        return resumed

    def _report(self, source: str, *, limit: int | None = LOST_AT_MOST) -> Operation[LinkReport]:
        """Return what only this node has of a source that was put back in time, by id, and which rows never came.

        At most `limit` ids are listed, None for all; the report says how many more there are.
        """
        name, limit = node_name(source), count_or_all(limit, "limit")
        yield from checking(self.schema)
        yield from self._no_bridge(name)
        return (yield from reporting(self.schema, name, limit))

    def _moved(self, name: str, *, actor: str, why: str | None = None) -> Operation[LinkMoved]:
        """Say that the node `name` was moved to another database or server; where it is now is noted at its next hello.

        Also for a node that takes the place of a reader, and for an old primary that is to be the source again.
        """
        yield from beginning_act(self.schema, actor, why)
        yield from self._no_bridge(name)
        return (yield from moving(self.schema, node_name(name), actor=actor, why=why))

    def _no_bridge(self, name: str, act: str | None = None) -> Operation[None]:
        """Raise `UnknownLink` if `name` is a bridge, for which `act` is a command of its own."""
        [(is_bridge,)] = yield BRIDGE.at(schema=self.schema)(name=node_name(name))
        if is_bridge:
            command = "mailroom bridge status" if act is None else f"mailroom bridge {act} {name}"
            raise UnknownLink(f"{name} is a bridge to a broker, and no link to a node. See: {command}")


class Links(_Operations):
    """The links of a node to other nodes, each in a database of its own. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`, works in the caller's
    transaction and never commits; with `dry_run` it changes nothing and returns what it would. `actor` says who acts
    and `why` gives the reason; both are written to the table `audit`.

    Raises `UnknownLink`, `InvalidName`, `ConfigurationError`, and `NotInTransaction` on an autocommit connection
    outside a transaction.
    """

    allow = on_connection(_Operations._allow)
    add = on_connection(_Operations._add)
    set = on_connection(_Operations._set)
    status = on_connection(_Operations._status)
    wait = on_connection(_Operations._wait)
    remove = on_connection(_Operations._remove)
    exclude = on_connection(_Operations._exclude)
    include = on_connection(_Operations._include)
    cut = on_connection(_Operations._cut)
    resume = on_connection(_Operations._resume)
    resume_order = on_connection(_Operations._resume_order)
    report = on_connection(_Operations._report)
    moved = on_connection(_Operations._moved)


class AsyncLinks(_Operations):
    """`Links` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    allow = on_async_connection(_Operations._allow)
    add = on_async_connection(_Operations._add)
    set = on_async_connection(_Operations._set)
    status = on_async_connection(_Operations._status)
    wait = on_async_connection(_Operations._wait)
    remove = on_async_connection(_Operations._remove)
    exclude = on_async_connection(_Operations._exclude)
    include = on_async_connection(_Operations._include)
    cut = on_async_connection(_Operations._cut)
    resume = on_async_connection(_Operations._resume)
    resume_order = on_async_connection(_Operations._resume_order)
    report = on_async_connection(_Operations._report)
    moved = on_async_connection(_Operations._moved)
