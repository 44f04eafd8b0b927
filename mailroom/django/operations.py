"""Operations for migrations of Django: the schema of a node, its inboxes and what they subscribe to.

They act on the database and the schema that the setting `MAILROOM` names, and do nothing where another database is
migrated. Each is in a transaction, also in a migration that is not atomic.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from mailroom.django.place import NodePlace, place
from mailroom.registry.drop import drop_inbox
from mailroom.registry.inboxes import create_inbox, set_inbox
from mailroom.registry.subscriptions import subscribe, unsubscribe
from mailroom.schema import current_revision, migrate

__all__ = ["CreateInbox", "MailroomSchema", "SetInbox", "Subscribe"]


class _OnNode(Operation):  # type: ignore[misc]  # Django has no types
    """What all share: where they act, and that Django's models do not change."""

    reduces_to_sql = False  # what is to be done depends on what is there
    reversible = True
    atomic = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Leave Django's models as they are."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Do it."""
        if (node := self._node(app_label, schema_editor)) is not None:
            self._forwards(schema_editor.connection, node.schema, _actor(app_label))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Undo it."""
        if (node := self._node(app_label, schema_editor)) is not None:
            self._backwards(schema_editor.connection, node.schema, _actor(app_label))

    def _node(self, app_label: str, schema_editor: Any) -> NodePlace | None:
        alias, node = schema_editor.connection.alias, place()
        return node if alias == node.database and router.allow_migrate(alias, app_label) else None

    def _forwards(self, connection: Any, schema: str, actor: str) -> None:
        raise NotImplementedError

    def _backwards(self, connection: Any, schema: str, actor: str) -> None:
        raise NotImplementedError


def _actor(app_label: str) -> str:
    return f"django migration of {app_label}"[:63]


# D-schema-8: An operation of Django's migrations never migrates a schema back.
class MailroomSchema(_OnNode):
    """Migrate the node's schema to a revision, unless it is there already or beyond.

    The app `mailroom` has it in its own migrations, so yours only depend on `("mailroom", "0001_initial")`. Undone, it
    migrates to the revision `before`; `base`, the default, removes the schema. That raises `SchemaError` while the
    tables that it drops hold messages.
    """

    def __init__(self, revision: str, before: str = "base") -> None:
        self.revision = revision
        self.before = before

    def describe(self) -> str:
        """Return what `migrate --plan` prints."""
        return f"Mailroom: migrate the schema to {self.revision}"

    def _forwards(self, connection: Any, schema: str, actor: str) -> None:
        # `mailroom migrate` of a later release may have been here: to go to this revision would be a downgrade.
        found = current_revision(connection, schema=schema)
        if found is None or found < self.revision:
            migrate(connection, schema=schema, revision=self.revision, actor=actor)

    def _backwards(self, connection: Any, schema: str, actor: str) -> None:
        migrate(connection, schema=schema, revision=self.before, actor=actor)


class CreateInbox(_OnNode):
    """Create an inbox that subscribes to topics: `mailroom.create_inbox`, whose settings it takes by name.

    An inbox that exists stays as it is, and `SetInbox` changes it. Undone, this drops the inbox. That raises
    `SchemaError` while messages are in it or parked.
    """

    def __init__(self, inbox: str, subscribe: Iterable[str] | str = (), **settings: Any) -> None:
        self.inbox = inbox
        self.subscribe = subscribe
        self.settings = settings

    def describe(self) -> str:
        """Return what `migrate --plan` prints."""
        return f"Mailroom: create the inbox {self.inbox}"

    def _forwards(self, connection: Any, schema: str, actor: str) -> None:
        create_inbox(connection, self.inbox, self.subscribe, schema=schema, actor=actor, **self.settings)

    def _backwards(self, connection: Any, schema: str, actor: str) -> None:
        drop_inbox(connection, self.inbox, actor=actor, why="migrated backwards", schema=schema)


class SetInbox(_OnNode):
    """Change settings of an inbox: `mailroom.set_inbox`. Undone, it sets those that stand in `before`."""

    def __init__(self, inbox: str, *, before: Mapping[str, Any], **settings: Any) -> None:
        self.inbox = inbox
        self.before = before
        self.settings = settings

    def describe(self) -> str:
        """Return what `migrate --plan` prints."""
        return f"Mailroom: change settings of the inbox {self.inbox}"

    def _forwards(self, connection: Any, schema: str, actor: str) -> None:
        set_inbox(connection, self.inbox, schema=schema, actor=actor, **self.settings)

    def _backwards(self, connection: Any, schema: str, actor: str) -> None:
        set_inbox(connection, self.inbox, schema=schema, actor=actor, why="migrated backwards", **self.before)


class Subscribe(_OnNode):
    """Subscribe an inbox to topics: `mailroom.subscribe`. Undone, it ends these subscriptions."""

    def __init__(self, inbox: str, topics: Iterable[str] | str) -> None:
        self.inbox = inbox
        self.topics = topics

    def describe(self) -> str:
        """Return what `migrate --plan` prints."""
        return f"Mailroom: subscribe the inbox {self.inbox}"

    def _forwards(self, connection: Any, schema: str, actor: str) -> None:
        subscribe(connection, self.inbox, self.topics, schema=schema, actor=actor)

    def _backwards(self, connection: Any, schema: str, actor: str) -> None:
        unsubscribe(connection, self.inbox, self.topics, schema=schema, actor=actor, why="migrated backwards")
