"""Faults by those who use it: what writers send, what handlers and registered functions do, what operators ask for."""

import contextlib
import random
import time
from typing import Any
from uuid import UUID, uuid4

import psycopg

from inbox import Parked
from mailroom import create_inbox
from mailroom.errors import InvalidName, SchemaError
from outbox import Outbox, Store
from tests.faults.invariants import Violation
from tests.faults.ledger import PROBE, SENT
from tests.faults.load import ENDING, EVENT, KILLING, RUDE, WORKED
from tests.faults.role_worker import RUDENESS
from tests.faults.stage import Stage


class Violated(Exception):
    """A promise was seen broken on the way."""

    def __init__(self, invariant: str, promise: str) -> None:
        super().__init__(promise)
        self.violation = Violation(invariant, promise, ())


def send(session: psycopg.Connection[Any], topic: str, key: str, position: int = 0) -> None:
    """Send a message of the campaign's own, and note it."""
    number = uuid4()
    Outbox().send(session, topic, {"id": str(number)}, key=key, id=number)
    session.execute(SENT, [[number], [topic], [key], [position]])


# Bytes that are no value, and keys at the edge of what is allowed.
CORPUS = (
    b"", b"\xff", b"\x9f", b"\x81" * 4_000, b"\xa2\x01\x02\x01\x02", b"\xc2\x41\xff", b"\x1b" + b"\xff" * 8,
    b"\xd8\x1c\x80", b"\x01\x02", b"\x5a\xff\xff\xff\xff", b"\xfb\x7f\xf8\x00\x00\x00\x00\x00\x01", b"\x00" * 65_536,
)  # fmt: skip
ODD_KEYS = ("\x01", "é" * 512, "k" * 1_024, "' ; DROP TABLE x --", "\u202e", "a\nb", "%s", "\ufffe")


KILLING_SHARE = 0.3


def poison_corpus(stage: Stage, dice: random.Random) -> str:
    """F27: what no handler can decode, written by SQL as another language would; and one that workers die of."""
    with stage.host.session() as session, session.transaction():
        if dice.random() < KILLING_SHARE:
            send(session, dice.choice(WORKED), f"{KILLING}{uuid4()}")
        rows: list[tuple[UUID, str, str]] = []
        for value in CORPUS:
            number, topic = uuid4(), dice.choice(WORKED)
            key = f"{number}{dice.choice(ODD_KEYS)}"
            while len(key.encode()) > 1_024:
                key = key[:-1]
            session.execute(
                "INSERT INTO mailroom.outbox (message_id, topic, key, value) VALUES (%s, %s, %s, %s)",
                [number, topic, key, value],
            )
            rows.append((number, topic, key))
        session.execute(SENT, [*map(list, zip(*rows, strict=True)), list(range(1, 1 + len(rows)))])
    return "messages"


ENDING_SHARE = 0.2


def end_batches(stage: Stage, dice: random.Random) -> str:
    """F42: messages whose handler ends the transaction, among others that are sent with them."""
    with stage.host.session() as session, session.transaction():
        for position in range(dice.randint(5, 20)):
            key = f"{ENDING}{uuid4()}" if dice.random() < ENDING_SHARE else f"{PROBE}{uuid4()}"
            send(session, dice.choice(WORKED), key, position)
    return "messages"


def replay_parked(stage: Stage, dice: random.Random) -> str:
    """F34: somebody lets parked keys go on, which have not become any better; and is not always sure of it."""
    with stage.host.session() as session, session.transaction(force_rollback=dice.random() < 0.3):
        Parked("alpha").replay(session, None, actor="faults", limit=dice.randint(1, 5))
        time.sleep(dice.uniform(0, 0.3))
    return "operator"


# No executables, each in a way of its own: what of `columns` is given, and the value.
SMUGGLED = (
    ("operation", "'merge'"), ("notify", "'no topic'"), ("sent_at", "'infinity'"), ("after_clock", "-1"),
    ("headers", "'[]'"), ("key", "''"), ("source", "repeat('s', 201)"),
)  # fmt: skip
# A function that leaves the session to the next as nobody wants it, in the transaction or for good.
GUEST = """
DO $$ BEGIN CREATE ROLE faults_guest; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
CREATE OR REPLACE FUNCTION faults.guest(how jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE how->>'does';
END $$;
INSERT INTO mailroom.executable_function VALUES ('guest', 'faults', 'guest', 10) ON CONFLICT DO NOTHING;
"""
LEAVES = (
    "SET LOCAL ROLE faults_guest", "SET ROLE faults_guest", "SET SESSION AUTHORIZATION faults_guest",
    "SET LOCAL session_replication_role = replica", "SET session_replication_role = replica",
    "SET LOCAL search_path = public", "SET statement_timeout = 1", "SET mailroom.notify = off",
    "SET default_transaction_read_only = on", "SET lock_timeout = 1", "RESET ALL",
)  # fmt: skip


def odd_executables(stage: Stage, dice: random.Random) -> str:
    """F36: rows that came past the trigger, between calls of a function that leaves settings in the session."""
    with stage.host.session() as session, session.transaction():
        session.execute(GUEST)
        for _ in range(dice.randint(1, 5)):
            Store().call(session, "guest", {"does": dice.choice(LEAVES)})
            column, value = dice.choice(SMUGGLED)
            columns = {"message_id": f"'{uuid4()}'", "operation": "'increment'", "key": "'all'", "amount": "0"}
            columns[column] = value
            session.execute("SET LOCAL session_replication_role = replica")
            session.execute(
                f"WITH past AS (INSERT INTO mailroom.outbox_executable ({', '.join(columns)}) "
                f"VALUES ({', '.join(columns.values())}) RETURNING message_id) "
                "INSERT INTO faults.smuggled SELECT message_id FROM past".encode()
            )
            session.execute("SET LOCAL session_replication_role = origin")
    return "executor"


def rude_handlers(stage: Stage, dice: random.Random) -> str:
    """F39: messages whose handler ends its own session, or always fails as if it were nobody's fault."""
    with stage.host.session() as session:
        for _ in range(dice.randint(1, 3)):
            with session.transaction():
                send(session, dice.choice(WORKED), f"{RUDE}{dice.choice(sorted(RUDENESS))}-{uuid4()}")
    return "worker"


def cancel_executors(stage: Stage, dice: random.Random) -> str:
    """F40: somebody has the rows that executors wait for, and each session that waits for them is cancelled."""
    waiting = (
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'mailroom executor' AND wait_event_type = 'Lock'"
    )
    until, cancelled = time.monotonic() + dice.uniform(0.5, 2.5), 0
    with stage.host.session() as holder, stage.host.session() as session, holder.transaction():
        holder.execute("SELECT FROM mailroom.store FOR UPDATE")
        while time.monotonic() < until:
            cancelled += len(session.execute(waiting).fetchall())
            time.sleep(0.02)
    return "executor" if cancelled else ""


OCCUPIED = ("registry", "registry_pkey")  # what inboxes of these names would be called is there, and is none


def come_and_go(stage: Stage, dice: random.Random) -> str:
    """F41: an inbox is made and removed, step by step; and one is asked for whose name something else has."""
    with stage.host.session() as session:
        name = f"guest_{dice.randrange(10**6)}"
        with session.transaction():
            create_inbox(session, name, ["nobody.sends"])
        with contextlib.suppress(InvalidName, SchemaError), session.transaction():
            create_inbox(session, dice.choice(OCCUPIED), [EVENT])
            raise Violated("I16", "an inbox whose name something else has is refused")
        steps = [
            f"DROP TABLE mailroom.inbox_{name}",
            f"DELETE FROM mailroom.subscription WHERE inbox = '{name}'",
            f"DELETE FROM mailroom.inbox_registry WHERE name = '{name}'",
        ]
        session.execute("SET lock_timeout = '30s'")
        for step in dice.sample(steps, len(steps)):
            session.execute(step.encode())
            time.sleep(dice.uniform(0, 0.7))
    return "operator"
