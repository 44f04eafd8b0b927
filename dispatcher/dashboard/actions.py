"""What an operator may do from a page: the acts of the commands, with the user and a reason in the audit."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from psycopg import Connection

from dispatcher.dashboard.access import User
from dispatcher.dashboard.chosen import AT_ONCE, failing_keys, parked_keys
from dispatcher.dashboard.guard import Refused
from inbox.archive import Archive
from inbox.inbox import Inbox
from mailroom.bridges.bridges import Bridges
from mailroom.cli.acting import counted
from mailroom.node.dead_letter import DeadLetters
from mailroom.schema import acts
from mailroom.sql.runner import run
from outbox.cancel import cancelling_by_hand
from outbox.periodic.periodic import Periodic

Fields = Mapping[str, str]
Does = Callable[[Connection[Any], Fields, dict[str, Any]], str]


class Acts:
    """The acts on one node: `known` says which. Each is given the fields of its form, and says what it did."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self.known: Mapping[acts.Act, Does] = {
            acts.PARKED_REPLAY: self._replay_parked,
            acts.PARKED_DISCARD: self._discard_parked,
            acts.ARCHIVE_REPLAY: self._replay_reaped,
            acts.DEAD_LETTER_REQUEUE: self._requeue,
            acts.DEAD_LETTER_DISCARD: self._discard_dead,
            acts.INBOX_PAUSE: self._pause,
            acts.INBOX_RESUME: self._resume,
            acts.INBOX_RETRY: self._retry,
            acts.PERIODIC_PAUSE: self._pause_periodic,
            acts.PERIODIC_RESUME: self._resume_periodic,
            acts.BRIDGE_RESUME: self._resume_bridge,
            acts.OUTBOX_CANCEL: self._cancel,
        }

    def do(self, connection: Connection[Any], user: User, act: acts.Act, fields: Fields) -> str:
        """Do it in the connection's transaction. Raises `Refused` where the user may not, or for a wrong form."""
        if act.verb not in user.may:
            raise Refused(403, f"{user.name} may not {act.verb} here.")
        why = fields.get("why", "").strip()
        if not why:
            raise Refused(400, "Say why: the reason goes into the audit.")
        return self.known[act](connection, fields, {"actor": user.name, "why": why})

    # -- Parked keys, and what was reaped -----------------------------------------------------------------------------

    def _replay_parked(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        changed = parked_keys(connection, self._schema, fields).replay(connection, self._schema, by)
        return f"{counted(changed.messages, 'message')} of {counted(changed.keys, 'parked key')} replayed."

    def _discard_parked(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        _be_sure(fields)
        per_key = 1 if fields.get("first") else None
        changed = parked_keys(connection, self._schema, fields).discard(connection, self._schema, by, per_key)
        return (
            f"{counted(changed.messages, 'message')} of {counted(changed.keys, 'parked key')} discarded; "
            f"{counted(changed.freed, 'key')} no longer parked."
        )

    def _replay_reaped(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        found = Archive(fields["inbox"], schema=self._schema).replay(connection, UUID(fields["id"]), **by)
        return f"{counted(found, 'message')} replayed into inbox {fields['inbox']}."

    # -- Dead letters -------------------------------------------------------------------------------------------------

    def _requeue(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        number = DeadLetters(schema=self._schema).requeue(connection, **_letters(fields), **by)
        return f"{counted(number, 'dead letter')} requeued."

    def _discard_dead(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        _be_sure(fields)
        number = DeadLetters(schema=self._schema).discard(connection, **_letters(fields), **by)
        return f"{counted(number, 'dead letter')} discarded."

    # -- Pauses -------------------------------------------------------------------------------------------------------

    def _pause(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        is_new = Inbox(fields["inbox"], schema=self._schema).pause(connection, fields.get("key"), **by)
        return f"{_of(fields)} {'is paused' if is_new else 'was paused before'}."

    def _resume(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        was_paused = Inbox(fields["inbox"], schema=self._schema).resume(connection, fields.get("key"), **by)
        return f"{_of(fields)} {'goes on' if was_paused else 'was not paused'}."

    def _retry(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        number = failing_keys(connection, self._schema, fields).retry(connection, self._schema, by)
        return f"{counted(number, 'failing key')} will be tried at once."

    def _pause_periodic(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        is_new = Periodic(schema=self._schema).pause(connection, fields["name"], **by)
        return f"{fields['name']} {'is paused' if is_new else 'was paused before'}."

    def _resume_periodic(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        was_paused = Periodic(schema=self._schema).resume(connection, fields["name"], **by)
        return f"{fields['name']} {'goes on' if was_paused else 'was not paused'}."

    def _resume_bridge(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        was_stopped = Bridges(schema=self._schema).resume(connection, fields["name"], **by)
        return f"Bridge {fields['name']} {'is tried at once' if was_stopped else 'was not stopped'}."

    # -- Messages that are not delivered yet --------------------------------------------------------------------------

    def _cancel(self, connection: Connection[Any], fields: Fields, by: dict[str, Any]) -> str:
        id = UUID(fields["id"])
        keys = run(connection, cancelling_by_hand(self._schema, id, by["actor"], by["why"]))
        return f"Message {id} is cancelled." if keys else f"Message {id} is not cancelled: it is no longer waiting."


def _letters(fields: Fields) -> dict[str, Any]:
    """Return which dead letters are meant: one, or the oldest of those that a page was filtered by."""
    if "id" in fields:
        return {"ids": int(fields["id"])}
    if not fields.get("all"):  # a form that lost its number must not mean every letter
        raise Refused(400, "The form names nothing to change.")
    return {
        "ids": None,
        "matching": fields.get("matching") or None,
        "stage": fields.get("stage") or None,
        "inbox": fields.get("inbox") or None,
        "limit": AT_ONCE,
    }


def _be_sure(fields: Fields) -> None:
    if not fields.get("sure"):
        raise Refused(400, "Tick that these messages are to be discarded.")


def _of(fields: Fields) -> str:
    key = fields.get("key")
    return f"Inbox {fields['inbox']}" if key is None else f"Key {key} of inbox {fields['inbox']}"
