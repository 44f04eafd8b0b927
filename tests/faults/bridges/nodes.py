"""The two nodes: what publishes to Kafka, and what takes in from there."""

import shutil
import signal
import subprocess
from pathlib import Path
from uuid import UUID

from inbox import Inbox
from mailroom import create_inbox
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.bridges.source import BrokerPosition
from mailroom.node.identity import advance_clock
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.faults.bridges.checks import BRIDGED, EXACTLY, PARTITIONS, QUEUE, RABBIT, STREAM, TAKEN_IN, Place
from tests.faults.links.checks import Handled, Sent
from tests.faults.links.struck import StruckNode

# Where something may still be published, or stands still.
UNPUBLISHED = """
SELECT (SELECT count(*) FROM mailroom.outbox) + (
    SELECT coalesce(sum(greatest((SELECT max(seq) FROM mailroom.transit AS t WHERE t.link = l.number) - acked, 0)), 0)
    FROM mailroom.link AS l) + (SELECT count(*) FROM mailroom.bridge_out WHERE why IS NOT NULL)
"""
UNHANDLED = """
SELECT (SELECT count(*) FROM mailroom.inbox) + (SELECT count(*) FROM mailroom.origin WHERE why IS NOT NULL)
"""
POSITIONS = """
SELECT p.topic, p.part, p.next FROM mailroom.bridge_position AS p
"""
KNOWN = POSITIONS + " WHERE p.last IS NOT NULL AND p.log IS NOT NULL"
WHY_OUT = """
SELECT b.state, b.why FROM mailroom.bridge_out AS b JOIN mailroom.link AS l ON l.number = b.link WHERE l.name = %s
"""
SESSIONS = """
SELECT pid, application_name, state, wait_event, pg_blocking_pids(pid), left(query, 60),
       round(extract(epoch FROM clock_timestamp() - xact_start), 1)::text
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY application_name, pid
"""
DEAD = "SELECT stage, reason, count(*) FROM mailroom.dead_letter GROUP BY 1, 2"


def into(topic: str) -> str:
    """Return the name of the bridge that takes a topic in."""
    return f"from-{topic}"


def _locking() -> Operation[None]:
    yield DISPATCH_LOCK.at(schema="mailroom")()


class _Node(StruckNode):
    situations: dict[str, str]

    def waiting(self) -> int:
        """Count what is not published."""
        with self.host.session() as session:
            [(rows,)] = session.execute(UNPUBLISHED).fetchall()
        return int(rows)

    def take_sent(self) -> list[Sent]:
        """Return what was sent since the last time, and forget it."""
        with self.host.session() as session, session.transaction():
            rows = session.execute("DELETE FROM ring.sent RETURNING topic, id, key, nth, cause").fetchall()
        return [Sent(id, topic, key, nth, cause) for topic, id, key, nth, cause in rows]

    def dead(self) -> list[str]:
        """Return what stands in the node's tables though no fault explains it."""
        with self.host.session() as session:
            dead = session.execute(DEAD).fetchall()
        return [f"{self.name}: dead letters: {dead[:5]}"] if dead else []

    def situation(self) -> str:
        """Return what there is to know about a node that waits: tables, sessions, and where its daemons stand."""
        with self.host.session() as session:
            queries = self.situations | {"sessions": SESSIONS}
            rows = {name: session.execute(query.encode()).fetchall() for name, query in queries.items()}
        lines = [f"{name}: {found}" for name, found in rows.items()]
        for daemon in self.daemons:
            stacks = [each for each in daemon.stacks() if each] or ["no answer"]
            lines += [f"daemon {daemon.pid} of {daemon.lives} lives", *(f"  {each}" for each in stacks)]
        return "\n  ".join([f"{self.name}:", *lines])


class OutNode(_Node):
    """The node that publishes."""

    situations = {  # noqa: RUF012 - nobody changes it
        "outbox": "SELECT count(*) FROM mailroom.outbox",
        "links": "SELECT name, state, acked, run, (SELECT (max(seq), max(sent_clock)) FROM mailroom.transit "
        "WHERE link = l.number) FROM mailroom.link AS l",
        "bridges": "SELECT link, state, trouble, why, since FROM mailroom.bridge_out",
        "leases": "SELECT role, pid, state, until > clock_timestamp() FROM mailroom.lease",
    }

    def bridge(self, kafka: str, nats: str, rabbit: str) -> None:
        """Publish each topic to the one of its name."""
        form = Form("{topic}", encode="cbor")
        settings = {topic: OutSettings("kafka", kafka, form) for topic in BRIDGED}
        settings[EXACTLY] = OutSettings("kafka", kafka, form, True, EXACTLY)
        settings[STREAM] = OutSettings("nats", nats, Form(f"{STREAM}.{{topic}}", encode="cbor"))
        settings[RABBIT] = OutSettings("rabbitmq", rabbit, Form(RABBIT, encode="cbor"))
        with self.host.session() as session, session.transaction():
            for topic, each in settings.items():
                Bridges().out(session, topic, each, topics=[topic], actor="campaign")

    def own_id(self, topic: str) -> str:
        """Return the transactional id of a bridge, which is the name of its group, too."""
        with self.host.session() as session:
            [(link,)] = session.execute("SELECT number FROM mailroom.link WHERE name = %s", [topic]).fetchall()
        return f"mailroom.{self.id}.{link}"

    def why_stopped(self, topic: str) -> str:
        """Return why a bridge is stopped, empty if it is not."""
        with self.host.session() as session:
            [(state, why)] = session.execute(WHY_OUT, [topic]).fetchall()
        return str(why) if state == "stopped" else ""

    def marked(self, topic: str) -> int:
        """Return up to which clock the broker has acknowledged what a bridge publishes exactly once."""
        with self.host.session() as session:
            [(clock,)] = session.execute(WHY_OUT.replace("b.state, b.why", "b.marked"), [topic]).fetchall()
        return int(clock or 0)

    def resume(self, topic: str) -> None:
        """Have a bridge go on."""
        with self.host.session() as session, session.transaction():
            Bridges().resume(session, topic, actor="campaign")

    def sent_ids(self, topic: str = "%") -> set[UUID]:
        """Return the ids of what was sent since it was taken last."""
        with self.host.session() as session:
            return {id for (id,) in session.execute("SELECT id FROM ring.sent WHERE topic LIKE %s", [topic]).fetchall()}

    def copy(self, into: Path) -> None:
        """Copy the server's files, as a cold backup does; it is down and up again."""
        shutil.rmtree(into, ignore_errors=True)
        self.host.stop(signal.SIGINT)
        subprocess.run(["cp", "-a", str(self.host.directory / "data"), str(into)], check=True)
        self.bring_back()

    def put_back(self, copy: Path) -> None:
        """Put the server back to a copy of its files, and let its clock go beyond what others have seen of it."""
        shown = self.clock() + 1  # an operator finds it in the newest records at the broker
        self.host.stop(signal.SIGINT)
        shutil.rmtree(self.host.directory / "data")
        subprocess.run(["cp", "-a", str(copy), str(self.host.directory / "data")], check=True)
        self.bring_back()
        with self.host.session() as session, session.transaction():
            advance_clock(session, shown, actor="campaign")


class InNode(_Node):
    """The node that takes in."""

    situations = OutNode.situations | {
        "waiting": "SELECT inbox, count(*), min(sent_clock) FROM mailroom.inbox GROUP BY inbox",
        "origins": "SELECT name, state, trouble, why, since FROM mailroom.origin",
        "positions": "SELECT * FROM mailroom.bridge_position ORDER BY 1, 2, 3",
        "marks": "SELECT * FROM mailroom.bridge_mark ORDER BY 1, 2, 3",
    }

    def __init__(self, home: Path, name: str, seed: int) -> None:
        super().__init__(home, name, seed)
        self.inboxes = {topic: Inbox(topic) for topic in TAKEN_IN}

    def bridge(self, kafka: str, nats: str, rabbit: str) -> None:
        """Take in each topic, into an inbox of its name; and publish to the work queue."""
        settings = {topic: InSettings("kafka", kafka, (topic,)) for topic in PARTITIONS}
        settings[STREAM] = InSettings("nats", nats, (STREAM,))
        settings[RABBIT] = InSettings("rabbitmq", rabbit, (RABBIT,))
        with self.host.session() as session, session.transaction():
            for topic, each in settings.items():
                Bridges().into(session, into(topic), each, actor="campaign")
                create_inbox(session, topic, [topic], origin=into(topic))
            queue = OutSettings("nats", nats, Form(f"{QUEUE}.{{topic}}", encode="cbor"))
            Bridges().out(session, QUEUE, queue, topics=[QUEUE], actor="campaign")

    def waiting(self) -> int:
        """Count what is to be handled, and bridges that stand still."""
        with self.host.session() as session:
            [(rows,)] = session.execute(UNHANDLED).fetchall()
        return int(rows) + super().waiting()

    def positions(self) -> dict[Place, int]:
        """Return where it goes on in each partition."""
        with self.host.session() as session:
            rows = session.execute(POSITIONS).fetchall()
        return {(topic, part): at for topic, part, at in rows}

    def known(self) -> dict[Place, int]:
        """Return the positions of which the last record is known that was taken in, and the log that it is in."""
        with self.host.session() as session:
            rows = session.execute(KNOWN).fetchall()
        return {(topic, part): at for topic, part, at in rows}

    def why_stopped(self, topic: str) -> str:
        """Return why a bridge is stopped, empty if it is not."""
        with self.host.session() as session:
            [(state, why)] = session.execute(
                "SELECT state, why FROM mailroom.origin WHERE name = %s", [into(topic)]
            ).fetchall()
        return str(why) if state == "stopped" else ""

    def go_on(self, place: Place, offset: int) -> int:
        """Resume a bridge at an offset, unless it is further by now; return where it was."""
        topic, part = place
        # Who stands still may have a transaction open, and nothing goes on before it does.
        with self.host.session(options="-c lock_timeout=3s") as session, session.transaction():
            run(session, _locking())  # nothing is taken in meanwhile
            [(was,)] = session.execute(
                "SELECT next FROM mailroom.bridge_position WHERE topic = %s AND part = %s", [topic, part]
            ).fetchall()
            if was < offset:
                Bridges().resume(session, into(topic), actor="campaign", at=BrokerPosition(topic, part, offset))
        return int(was)

    def set_to(self, place: Place, offset: int) -> None:
        """Resume a bridge at an offset, wherever it was."""
        with self.host.session() as session, session.transaction():
            Bridges().resume(session, into(place[0]), actor="campaign", at=BrokerPosition(*place, offset))

    def handled_ids(self, topic: str) -> set[UUID]:
        """Return the ids of what was handled since it was taken last."""
        with self.host.session() as session:
            return {id for (id,) in session.execute("SELECT id FROM ring.handled WHERE inbox = %s", [topic]).fetchall()}

    def take_handled(self) -> list[Handled]:
        """Return what was handled since the last time, in that order, and forget it."""
        with self.host.session() as session, session.transaction():
            rows = session.execute(
                "WITH gone AS (DELETE FROM ring.handled RETURNING *) "
                "SELECT inbox, id, origin, key, clock, sent_clock FROM gone ORDER BY turn"
            ).fetchall()
        return [Handled(*row) for row in rows]
