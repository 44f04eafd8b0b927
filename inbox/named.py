"""An inbox by its name: how it is made, subscribed, paused, renamed and dropped."""

from datetime import datetime
from typing import Unpack

from inbox.by_key.paused_keys import PausedKey
from inbox.by_log.rewind import Rewound, rewinding
from inbox.claims import Claims
from inbox.pausing import listing, pausing, resuming, waiting_for_batches
from mailroom.logs.readers import NOW
from mailroom.registry.drop import dropping
from mailroom.registry.inboxes import Order, creation, setting
from mailroom.registry.rename import renaming
from mailroom.registry.settings import InboxSettings
from mailroom.registry.subscriptions import Topics, subscription, unsubscription
from mailroom.sql.operation import Operation
from mailroom.values.names import DEFAULT_SCHEMA, OWN, Key


class Named:
    """The name of an inbox in a schema, which need not exist yet."""

    def __init__(self, inbox: str, *, schema: str = DEFAULT_SCHEMA) -> None:
        self._claims = Claims(schema, inbox)
        self.inbox = self._claims.inbox
        self.schema = self._claims.schema

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def _create(
        self,
        subscribe: Topics = (),
        *,
        origin: str = OWN,
        order: Order | None = None,
        log: str | None = None,
        since: str | datetime = NOW,
        actor: str | None = None,
        why: str | None = None,
        **settings: Unpack[InboxSettings],
    ) -> Operation[None]:
        """Create the inbox, as `mailroom.create_inbox` does."""
        return creation(
            self.inbox, subscribe, schema=self.schema, origin=origin, order=order, log=log, since=since, actor=actor,
            why=why, **settings,
        )  # fmt: skip

    def _set(
        self, *, actor: str | None = None, why: str | None = None, **settings: Unpack[InboxSettings]
    ) -> Operation[str]:
        """Change settings of the inbox; return what is different now. As `mailroom.set_inbox`."""
        return setting(self.inbox, schema=self.schema, actor=actor, why=why, **settings)

    def _subscribe(
        self, topics: Topics, *, origin: str = OWN, actor: str | None = None, why: str | None = None
    ) -> Operation[list[str]]:
        """Subscribe the inbox to topics; return those that it had not subscribed to. As `mailroom.subscribe`."""
        return subscription(self.inbox, topics, schema=self.schema, origin=origin, actor=actor, why=why)

    def _unsubscribe(
        self, topics: Topics, *, origin: str = OWN, actor: str | None = None, why: str | None = None
    ) -> Operation[list[str]]:
        """End subscriptions of the inbox; return those that it had. As `mailroom.unsubscribe`."""
        return unsubscription(self.inbox, topics, schema=self.schema, origin=origin, actor=actor, why=why)

    def _pause(self, key: Key | None = None, *, actor: str, why: str | None = None) -> Operation[bool]:
        """Pause the inbox, or a key of it: it gives out no messages until it is resumed; deliveries go on.

        All that take messages find none: workers, `reap` and `reap_any`, drains and streams of Spark. Messages
        that were taken before are handled to the end, and a claim that begins while this commits may still take
        some: commit, then `wait_for_batches`. A pause outlasts restarts, and stops no time: attempts of failing keys
        are kept and their waits run on, and what is older than `expire_s` expires. A key may be
        paused before it has messages; other keys go on.

        Returns whether it was not paused before; if it was, nothing changes. `actor` says who acts and `why` gives the
        reason; both are written to the table `audit`, and `mailroom.node.status` shows them.

        In the caller's transaction; commit soon. Raises `UnknownInbox`; `ConfigurationError` for a key of a total
        inbox, which can be paused only as a whole; and `InvalidMessage` for a wrong `key`, `actor` or `why`.
        """
        return pausing(self.schema, self.inbox, key, actor, why)

    def _resume(self, key: Key | None = None, *, actor: str, why: str | None = None) -> Operation[bool]:
        """End the pause of the inbox, or of a key; workers go on at once. Returns whether it was paused.

        An open breaker is closed too. The two pauses are apart: a paused key of an inbox that is resumed stays paused.
        A key that was failing or parked is so again. Raises as `pause` does.
        """
        return resuming(self.schema, self.inbox, key, actor, why)

    def _paused_keys(self, limit: int | None = 100) -> Operation[list[PausedKey]]:
        """Return at most `limit` paused keys (None: all), the longest paused first, and count their messages."""
        return listing(self.schema, self.inbox, limit)

    def _wait_for_batches(self, timeout_s: float = 60.0) -> Operation[None]:
        """Wait until no transaction has messages that were taken before this call, at most `timeout_s` seconds.

        After a pause that is committed this says that it is complete: no transaction that took messages is open, and
        none takes any. Only a transaction of your own at REPEATABLE READ or SERIALIZABLE that began before the pause,
        and that has taken nothing of the inbox yet, does not see it. A transaction that merely locked rows of the
        inbox, and a delivery that is under way, are waited for too.

        Raises `UnknownInbox`; `ConfigurationError` in a transaction that has changed something, since its own pause is
        not committed; and `MailroomError`, with the sessions that are waited for, after `timeout_s`.
        """
        return waiting_for_batches(self.schema, self.inbox, timeout_s)

    def _rewind(self, to: str | int | datetime, *, actor: str, why: str | None = None) -> Operation[Rewound]:
        """Have an inbox that reads a log read it again, from `to` on; return where it goes on.

        `to` is `start` (the oldest message that the log has), a datetime with a time zone, which is compared with times
        of delivery, or the clock of a message. What lies before the oldest message is gone: `Rewound` says so. An inbox
        that has not read so far yet stays where it is: this never skips a message.

        From then on its messages come once more, with the same ids and clocks, in order by key: exactly once between
        two rewinds. What failed or was parked after that place is read again, too, with its attempts counted from 1; a
        parked key stays parked, and holds its messages as they come. A paused one stays paused.

        In the caller's transaction. It waits for batches in hand, and none begins before the commit: commit soon.
        `actor` says who acts and `why` gives the reason; both are written to the table `audit`. Raises `UnknownInbox`,
        `ConfigurationError` for an inbox that reads no log and for a wrong `to`, and `InvalidMessage` for a wrong
        `actor` or `why`.
        """
        return rewinding(self.schema, self.inbox, to, actor, why)

    def _rename(self, new: str, *, actor: str, why: str | None = None) -> Operation[int]:
        """Give the inbox another name; return how many messages it has. As `mailroom.rename_inbox`.

        This object keeps the old name: once it is committed, make another one.
        """
        return renaming(self.inbox, new, actor=actor, why=why, schema=self.schema)

    def _drop(self, *, actor: str, discard: bool = False, why: str | None = None) -> Operation[int]:
        """Drop the inbox with all records about it; return how many messages it had. As `mailroom.drop_inbox`."""
        return dropping(self.inbox, actor=actor, discard=discard, why=why, schema=self.schema)
