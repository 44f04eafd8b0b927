"""A node of the ring: what is linked, what waits, and what it has lost."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from inbox import Inbox
from mailroom import create_inbox
from mailroom.links import Links
from mailroom.node.identity import advance_clock
from outbox import Outbox, Outgoing
from tests.faults.links.checks import ORDER, PLAIN, RING, TOTAL, Handled, Ledger, Sent
from tests.faults.links.struck import LOST, StruckNode

KEEP_S = 0.0  # what was acknowledged may go at once
ADVANCE = re.compile(r"mailroom node advance (\d+)$")
WAITING = """
SELECT (SELECT count(*) FROM mailroom.outbox) + (SELECT count(*) FROM mailroom.inbox) + (
    SELECT coalesce(sum((SELECT max(seq) FROM mailroom.transit AS t WHERE t.link = l.number) - acked), 0)
    FROM mailroom.link AS l), (SELECT last_value FROM ring.turn)
"""
TOLD = "SELECT acked FROM mailroom.link WHERE name = %s"
READ = """
SELECT coalesce((SELECT max(last) FROM mailroom.receipt AS r WHERE r.origin = o.number), 0)
FROM mailroom.origin AS o WHERE o.name = %s
"""
STAMPED = """
SELECT coalesce((SELECT max(seq) FROM mailroom.transit AS t WHERE t.link = l.number), 0)
FROM mailroom.link AS l WHERE l.name = %s
"""
# A reader matches once it has found its place, and not before its claim was answered.
PLACES = """
SELECT incarnation, resumed, (SELECT coalesce(bool_and(matched IS NOT NULL AND claim_seq IS NULL), false)
                              FROM mailroom.link WHERE name !~ '^guest')
FROM mailroom.node
"""


class RingNode(StruckNode):
    """One node of the ring."""

    def __init__(self, home: Path, name: str, seed: int) -> None:
        super().__init__(home, name, seed)
        self.inboxes = {name: Inbox(name) for name in (PLAIN, TOTAL)}
        self.others: Sequence[RingNode] = ()
        self.incarnation = 1
        self._heeded: set[tuple[str, str]] = set()  # what readers have said since it was put back
        self._unread = (0, 0)  # clock and ceiling before others could read this node

    def start(self) -> None:
        """Start the server and make the node."""
        super().start()
        with self.host.session() as session:
            [self._unread] = session.execute(
                "SELECT c.last_value, clock_ceiling FROM mailroom.node, mailroom.clock AS c"
            ).fetchall()

    def link(self, source: "RingNode", others: Sequence["RingNode"]) -> None:
        """Let all others read this node, and read them: messages of the ring from `source` only."""
        self.others = others
        with self.host.session() as session, session.transaction():
            for other in others:
                Links().allow(session, other.name, actor="campaign", keep_s=KEEP_S)
                Links().add(session, other.name, actor="campaign")
            create_inbox(session, PLAIN, [RING], origin=source.name)
            create_inbox(session, TOTAL, [ORDER], origin="*", order="total")

    def is_linked(self, readers: int) -> bool:
        """Return whether all readers have asked for what they want."""
        with self.host.session() as session:
            found = session.execute("SELECT topic, count(*) FROM mailroom.link_topic GROUP BY topic").fetchall()
        return dict(found) == {RING: 1, ORDER: readers}

    def put_back(self, readers: Sequence["RingNode"], guests: int) -> None:
        """Put it back to before anybody might read it, as a backup from then does, and allow `readers` in this order.

        So many `guests` come first, so that the links have other numbers. What it has received itself stays, and its
        ledgers, since only the source's part is of interest. An operator does what refusals ask for.
        """
        self._heeded.clear()
        with self.host.session() as session:
            with session.transaction():
                session.execute("SELECT mailroom.take_dispatch_turn()")
                for table in ("link_topic", "transit", "link"):
                    session.execute(f"DELETE FROM mailroom.{table}".encode())
                session.execute("ALTER SEQUENCE mailroom.link_number_seq RESTART")
                clock, ceiling = self._unread
                session.execute("SELECT setval('mailroom.clock', %s)", [clock])
                session.execute(
                    "UPDATE mailroom.node SET clock_ceiling = %s, started_at = started_at - interval '1 min'", [ceiling]
                )
                session.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND pid <> pg_backend_pid()"
                )
            with session.transaction():
                for name in [*(f"guest-{nth}" for nth in range(guests)), *(reader.name for reader in readers)]:
                    Links().allow(session, name, actor="campaign", keep_s=KEEP_S)

    def is_read_again(self, readers: Sequence["RingNode"]) -> bool:
        """Return whether all readers have found their places, and do what an operator is asked for."""
        self._do_as_told(readers)
        if not self.is_linked(len(readers)):
            return False
        with self.host.session() as session:
            [(self.incarnation, resumed, answered)] = session.execute(PLACES).fetchall()
            if answered and resumed < self.incarnation:
                with session.transaction():
                    Links().resume(session, readers[0].name, actor="campaign")
        return bool(answered) and not any(reader.why_not(self) for reader in readers)

    def _do_as_told(self, readers: Sequence["RingNode"]) -> None:
        for reader in readers:
            why = reader.why_not(self)
            if (reader.name, why) in self._heeded:  # it stands there until the reader has come again
                continue
            self._heeded.add((reader.name, why))
            if "mailroom link remove" in why:
                with self.host.session() as session, session.transaction():
                    Links().remove(session, reader.name, side="reader", actor="campaign")
                    Links().allow(session, reader.name, actor="campaign", keep_s=KEEP_S)
            elif (far := ADVANCE.search(why)) is not None:
                # Each start of a server that may have lost history jumps, and what it is put back to knows of none.
                with self.host.session() as session, session.transaction():
                    advance_clock(session, int(far[1]), actor="campaign")

    def why_not(self, source: "RingNode") -> str:
        """Return why a source is not read, empty if it is."""
        with self.host.session() as session:
            [(why,)] = session.execute("SELECT why FROM mailroom.origin WHERE name = %s", [source.name]).fetchall()
        return str(why or "")

    def send_again(self, sent: Sequence[Sent]) -> None:
        """Send what was sent before: it was waiting, or scheduled, in what the node was put back to."""
        with self.host.session() as session, session.transaction():
            Outbox().send_many(session, [Outgoing(each.topic, 0, key=each.key, id=each.id) for each in sent])

    def waiting(self) -> tuple[int, int]:
        """Count what is to be handled here or is not acknowledged elsewhere; and return the last turn."""
        with self.host.session() as session:
            [(rows, turn)] = session.execute(WAITING).fetchall()
        return int(rows), int(turn)

    def known_elsewhere(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return up to where the other nodes were told that this one has received, and what they have of it.

        By their names; without those whose servers are down.
        """
        told: dict[str, int] = {}
        read: dict[str, int] = {}
        for other in self.others:
            with contextlib.suppress(*LOST), other.host.session() as session:
                for query, found in ((TOLD, told), (READ, read)):
                    [(seq,)] = session.execute(query, [self.name]).fetchall()
                    found[other.name] = int(seq)
        return told, read

    def forgotten(self, told: Mapping[str, int], read: Mapping[str, int]) -> list[str]:
        """Return what this node has lost though others may rely on it; to be asked when it has crashed."""
        found = []
        with self.host.session() as session:
            for name, seq in told.items():
                [(has,)] = session.execute(READ, [name]).fetchall()
                if has < seq:
                    found.append(f"{self.name}: received from {name} up to {has} only, which was told {seq}")
            for name, seq in read.items():
                [(has,)] = session.execute(STAMPED, [name]).fetchall()
                if has < seq:
                    found.append(f"{self.name}: stamped for {name} up to {has} only, which has {seq}")
        return found

    def take_ledger(self) -> Ledger:
        """Return what was noted since the last time, and forget it."""
        with self.host.session() as session, session.transaction():
            sent = session.execute("DELETE FROM ring.sent RETURNING topic, id, key, nth, cause").fetchall()
            handled = session.execute(
                "WITH gone AS (DELETE FROM ring.handled RETURNING *) "
                "SELECT inbox, id, origin, key, clock, sent_clock FROM gone ORDER BY turn"
            ).fetchall()
        return Ledger(
            self.id,
            [Sent(id, topic, key, nth, cause) for topic, id, key, nth, cause in sent],
            [Handled(*row) for row in handled],
        )

    def trouble(self) -> list[str]:
        """Return what stands in the node's tables though no fault explains it."""
        with self.host.session() as session:
            dead = session.execute("SELECT stage, reason, count(*) FROM mailroom.dead_letter GROUP BY 1, 2").fetchall()
            state = session.execute("SELECT name, state, why FROM mailroom.origin WHERE state <> 'open'").fetchall()
            links = session.execute("SELECT name, state FROM mailroom.link WHERE state <> 'open'").fetchall()
            lost = session.execute(
                "SELECT incarnation FROM mailroom.node WHERE incarnation <> %s", [self.incarnation]
            ).fetchall()
        found = [("dead letters", dead), ("origins", state), ("links", links), ("a crash lost history", lost)]
        return [f"{self.name}: {what}: {rows[:5]}" for what, rows in found if rows]

    def situation(self) -> str:
        """Return what there is to know about a node that waits."""
        tables = {
            "waiting": "SELECT inbox, count(*), min(sent_clock) FROM mailroom.inbox GROUP BY inbox",
            "outbox": "SELECT count(*) FROM mailroom.outbox",
            "stable": "SELECT inbox, max(clock) FROM mailroom.stable GROUP BY inbox",
            "origins": "SELECT o.name, o.state, o.why, o.shown, (SELECT (max(last), max(sent_clock)) "
            "FROM mailroom.receipt WHERE origin = o.number) FROM mailroom.origin AS o",
            "links": "SELECT name, state, acked, wanted_clock, (SELECT (max(seq), max(sent_clock)) "
            "FROM mailroom.transit WHERE link = l.number) FROM mailroom.link AS l",
            "topics": "SELECT * FROM mailroom.link_topic",
            "node": "SELECT incarnation, resumed, life FROM mailroom.node",
            "places": "SELECT name, number, matched, claim_seq FROM mailroom.link",
            "pinned": "SELECT name, link, incarnation FROM mailroom.origin",
            "leases": "SELECT role, pid, state, until > clock_timestamp(), counts FROM mailroom.lease",
        }
        with self.host.session() as session:
            rows = {name: session.execute(query.encode()).fetchall() for name, query in tables.items()}
        return "\n  ".join([f"{self.name}:", *(f"{name}: {found}" for name, found in rows.items())])
