"""An inbox by its name: how it is made, subscribed, renamed and dropped."""

from typing import Literal

from inbox.claims import Claims
from mailroom.names import DEFAULT_SCHEMA, OWN
from mailroom.registry.drop import dropping
from mailroom.registry.inboxes import Order, creation
from mailroom.registry.rename import renaming
from mailroom.registry.subscriptions import Topics, subscription, unsubscription
from mailroom.sql.operation import Operation


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
        backoff_s: float | None = None,
        backoff_max_s: float | None = None,
        max_attempts: int | None = None,
        on_failure: Literal["park", "skip"] | None = None,
        keep_s: float | None = None,
        origin: str = OWN,
        order: Order | None = None,
    ) -> Operation[None]:
        """Create the inbox, or change its settings, as `mailroom.create_inbox` does."""
        return creation(
            self.inbox, subscribe, schema=self.schema, backoff_s=backoff_s, backoff_max_s=backoff_max_s,
            max_attempts=max_attempts, on_failure=on_failure, keep_s=keep_s, origin=origin, order=order,
        )  # fmt: skip

    def _subscribe(self, topics: Topics, *, origin: str = OWN) -> Operation[list[str]]:
        """Subscribe the inbox to topics; return those that it had not subscribed to. As `mailroom.subscribe`."""
        return subscription(self.inbox, topics, schema=self.schema, origin=origin)

    def _unsubscribe(self, topics: Topics, *, origin: str = OWN) -> Operation[list[str]]:
        """End subscriptions of the inbox; return those that it had. As `mailroom.unsubscribe`."""
        return unsubscription(self.inbox, topics, schema=self.schema, origin=origin)

    def _rename(self, new: str, *, actor: str, why: str | None = None) -> Operation[int]:
        """Give the inbox another name; return how many messages it has. As `mailroom.rename_inbox`.

        This object keeps the old name: once it is committed, make another one.
        """
        return renaming(self.inbox, new, actor=actor, why=why, schema=self.schema)

    def _drop(self, *, actor: str, discard: bool = False, why: str | None = None) -> Operation[int]:
        """Drop the inbox with all records about it; return how many messages it had. As `mailroom.drop_inbox`."""
        return dropping(self.inbox, actor=actor, discard=discard, why=why, schema=self.schema)
