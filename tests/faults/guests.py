"""Guests at logs: inboxes that begin in the past, read by hand what is there, and go; and a log that waits for none.

What each has read is held against the log itself, so that the ledgers need not know them.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import psycopg

from inbox import Inbox
from mailroom import create_inbox, create_log, drop_inbox, drop_log, set_log
from mailroom.errors import MailroomError
from tests.faults.load import EVENT, LOGS
from tests.faults.misuse import Violated, send
from tests.faults.role_dispatcher import DAY_S
from tests.faults.stage import Stage

GUEST, GUESTS = "guest_of_log", "guests"  # an inbox, and a log
ACTOR = "faults"
READ_WITHIN_S = 60
ROLLED_BACK = 0.2
BEGUN = "SELECT min(clock) FROM mailroom.log_receipt WHERE inbox = %s"
THERE = "SELECT message_id, key, clock FROM mailroom.log WHERE log = %s AND clock > %s ORDER BY clock"
BEHIND = """
SELECT FROM mailroom.inbox_registry AS r, LATERAL (
    SELECT DISTINCT ON (lane) lane, clock FROM mailroom.log_receipt AS p
    WHERE p.inbox = r.name ORDER BY lane, epoch DESC, clock DESC) AS at, LATERAL (
    SELECT FROM mailroom.log AS o
    WHERE o.log = r.log AND o.lane = at.lane AND o.clock > at.clock AND o.clock <= %s LIMIT 1) AS o
WHERE r.name = %s LIMIT 1
"""
LOST = "SELECT lost, lost_to FROM mailroom.inbox_registry WHERE name = %s"
Had = tuple[UUID, str, int]  # a message's id, key and clock


def come_to_logs(stage: Stage, dice: random.Random) -> str:
    """F49: an inbox is made that begins in a log's past, reads, and is dropped; or one whose log waits for nobody."""
    with stage.host.session() as session:
        session.execute("SET lock_timeout = '30s'")
        try:
            send_off(session)  # who was left behind
        except MailroomError:
            return ""
        try:
            if dice.random() < 0.5:
                moment = datetime.now(UTC) - timedelta(seconds=dice.uniform(0, 5 * DAY_S))
                since = dice.choice(("start", "now", moment))
                read_the_past(session, dice, dice.choice(sorted(LOGS)), since)
            else:
                _be_late(session, dice)
        finally:
            # Where the server went down, or somebody is at the inbox just then, the next guest sends this one off.
            with contextlib.suppress(psycopg.OperationalError, MailroomError):
                send_off(session)
    return "operator"


def read_the_past(session: psycopg.Connection[Any], dice: random.Random, log: str, since: str | datetime) -> None:
    """All that the log had after the place where the inbox begins is there until it was read, once and in order."""
    with session.transaction():
        create_inbox(session, GUEST, log=log, since=since)
    [(begun,)] = session.execute(BEGUN, [GUEST]).fetchall()
    there: list[Had] = session.execute(THERE, [log, begun]).fetchall()
    last = max((clock for *_, clock in there), default=begun)
    read = [each for each in _reading(session, dice, last) if each[2] <= last]
    _demand_once(read)
    if {each[0] for each in read} != {each[0] for each in there}:
        raise Violated("L1", f"an inbox reads what log {log} had when it was made: {len(read)} of {len(there)}")


def _be_late(session: psycopg.Connection[Any], dice: random.Random) -> None:
    """What a log drops unread is counted at the inbox, and all else is read."""
    with session.transaction():
        create_log(session, GUESTS, [EVENT], lanes=3, keep_days=1, drop_unread=True)
        create_inbox(session, GUEST, log=GUESTS)
    seen: dict[UUID, Had] = {}
    until = time.monotonic() + dice.uniform(2, 5) * DAY_S
    while time.monotonic() < until:
        with session.transaction():
            send(session, EVENT, f"guest-{uuid4()}")
        seen |= {each[0]: each for each in session.execute(THERE, [GUESTS, 0]).fetchall()}
        time.sleep(0.3)
    with session.transaction():
        set_log(session, GUESTS, drop_unread=False)
    seen |= {each[0]: each for each in session.execute(THERE, [GUESTS, 0]).fetchall()}
    last = max((clock for *_, clock in seen.values()), default=0)
    read = [*_reading(session, dice, last)]
    _demand_once(read)
    [(lost, lost_to)] = session.execute(LOST, [GUEST]).fetchall()
    missing = seen.keys() - {each[0] for each in read}
    if len(missing) > lost or any(seen[each][2] > lost_to for each in missing):
        raise Violated("L1", f"what a log drops unread is counted: {lost} up to {lost_to}, {len(missing)} are missing")


def _reading(session: psycopg.Connection[Any], dice: random.Random, last: int) -> Iterator[Had]:
    """Read all up to this clock; what a transaction had that is rolled back comes again."""
    until = time.monotonic() + READ_WITHIN_S
    while session.execute(BEHIND, [last, GUEST]).fetchall():
        if time.monotonic() > until:
            raise Violated("I11", "a new inbox of a log has read what was there within a minute")
        is_undone = dice.random() < ROLLED_BACK
        with session.transaction(force_rollback=is_undone):
            found = Inbox(GUEST).reap_any(session, dice.randint(1, 100), dice.randint(1, 10))
        if not is_undone:
            yield from ((one.id, one.key, one.clock) for one in found)


def _demand_once(read: list[Had]) -> None:
    if len({each[0] for each in read}) < len(read):
        raise Violated("L3", "a new inbox of a log has each message once")
    keys: dict[str, list[int]] = {}
    for _, key, clock in read:
        keys.setdefault(key, []).append(clock)
    if any(before >= after for clocks in keys.values() for before, after in pairwise(clocks)):
        raise Violated("L4", "per key, clocks rise in the order in which a new inbox of a log had the key")


def send_off(session: psycopg.Connection[Any]) -> None:
    """Drop the guest and the log that waits for none, if they are there."""
    for find, name in (("inbox_registry", GUEST), ("log_registry", GUESTS)):
        if session.execute(f"SELECT FROM mailroom.{find} WHERE name = %s".encode(), [name]).fetchall():
            with session.transaction():
                if name == GUEST:
                    drop_inbox(session, GUEST, discard=True, actor=ACTOR)
                else:
                    drop_log(session, GUESTS, actor=ACTOR)
