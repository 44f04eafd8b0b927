"""The stage: a server, a network, a cast under load, and the watch that keeps them going between faults."""

import contextlib
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psutil
import psycopg

from outbox import Outbox
from tests.faults import history, invariants
from tests.faults.actors import Actor
from tests.faults.host import Host
from tests.faults.invariants import Violation
from tests.faults.ledger import PROBE, SENT
from tests.faults.load import INBOXES, LOG_ROUTES, POISON, READERS, TARGETS
from tests.faults.network import Network
from tests.faults.nursery import Nursery
from tests.faults.pooler import Pooler
from tests.faults.role_writer import GID
from tests.faults.scarcity import SlowDisk, busy_cores, family
from tests.faults.task import USUAL, Habits, Task
from tests.support.port import free_port

# Messages waiting at which writers rest; they go on at half of it. Each probe waits behind so many: on two busy cores
# 200 a second are handled, so it is some seconds.
MOST_WAITING = 500
# Of a topic of a log; a topic of any other inbox is named like it.
RECEIVERS = {topic: [inbox for each, inbox in LOG_ROUTES if each == topic] for topic, _ in LOG_ROUTES}
WATCH_S = 0.25
COUNT_EACH = 2  # looks: what is unread of logs is counted message by message
WATCH_OPTIONS = "-c lock_timeout=1s"
ORPHAN_S = 2.0
HANDLED_WITHIN_S = 60.0  # I11: 30 s and what the backlog takes, with other faults meanwhile
LONG_S = 20.0  # from this on the report says who was the last
PATIENCE_S = 600.0  # at the most, where others' messages are handled meanwhile


SITUATION = """
SELECT pid, application_name, state, wait_event, pg_blocking_pids(pid), left(query, 60),
       round(extract(epoch FROM clock_timestamp() - xact_start), 1)::text
FROM pg_stat_activity WHERE datname = current_database() AND (state <> 'idle' OR wait_event_type = 'Lock')
ORDER BY xact_start"""


class NotHandled(Exception):
    """A message sent after a recovery was not handled in time."""


class Stage:
    """Everything that a campaign's faults strike; a context manager.

    `roles` are the names of those who come on, all if there are none; `environment` is the processes' own. With
    `timed` false the server's clock may jump; with `durable` false its settings let go of what was acknowledged.
    """

    def __init__(
        self, home: Path, seed: int, *, pace: float, habits: Habits = USUAL, roles: Sequence[str] = (),
        environment: Mapping[str, str] | None = None, server_directory: Path | None = None,
        settings: Mapping[str, str] | None = None, timed: bool = True, durable: bool = True,
        handled_within_s: float = HANDLED_WITHIN_S, patience_s: float = PATIENCE_S, most_waiting: int = MOST_WAITING,
    ) -> None:  # fmt: skip
        self.home = home
        self.host = Host(server_directory or home / "server", settings=settings)
        self.endings: Counter[str] = Counter()
        self.actors: dict[str, Actor] = {}
        self.liveness: dict[str, float] = {}  # the longest it took, by what
        self.dice = random.Random(seed)
        self.timed = timed
        self.habits = habits
        self.network: Network
        self.pooler: Pooler | None = None
        self._standing_still = threading.Lock()
        self._seed = seed
        self._pace = pace
        self._durable = durable
        self._handled_within_s = handled_within_s
        self._patience_s = patience_s
        self._most_waiting = most_waiting
        self._flushes: list[float] = []  # how slow the disk is, of each who wants that
        self._roles = roles
        self._environment = dict(environment or {})
        self._nursery: Nursery
        self._over = threading.Event()
        self._resting = False
        self._looks = self._unread = 0  # of `_throttle`; and what logs had for their readers
        self._closing = contextlib.ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as closing:
            if SlowDisk.available():
                self.host.disk = SlowDisk(self.home)
            self.host.start()
            closing.callback(self.host.close)
            self.host.make_node()
            server = urlsplit(self.host.dsn)
            self.network = Network(server.hostname or "127.0.0.1", server.port or 5432, self._seed)
            closing.callback(self.network.close)
            if Pooler.available():
                self.pooler = Pooler(self.home, self.host.dsn, free_port())
                closing.callback(self.pooler.kill)
                self.pooler.start()
            self._nursery = Nursery(self.home, self._environment)
            closing.callback(self._nursery.close)
            closing.callback(self._end_actors)
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._closing.close()

    def cast(self) -> None:
        """Let the actors come on, and begin to watch them."""
        through = self.network.dsn(self.host.dsn)
        direct = self.host.dsn
        tasks = [
            ("writer", "writer-1", direct, ""), ("writer", "writer-2", through, ""),
            ("dispatcher", "dispatcher-1", direct, ""), ("dispatcher", "dispatcher-2", through, ""),
            ("worker", "worker-a1", direct, "alpha"), ("worker", "worker-a2", through, "alpha"),
            ("worker", "worker-b1", direct, "beta"), ("worker", "worker-b2", through, "beta"),
            ("reaper", "reaper-1", direct, "gamma"), ("reaper", "reaper-2", through, "gamma"),
            ("worker", "worker-d1", direct, "delta"), ("worker", "worker-d2", through, "delta"),
            ("worker", "worker-v1", through, "bravo"), ("worker", "worker-v2", direct, "bravo"),
            ("reaper", "reaper-e1", direct, "epsilon"), ("rewinder", "rewinder-1", direct, ""),
        ]  # fmt: skip
        if self.pooler is not None:
            tasks += [("writer", "writer-3", self.pooler.dsn, ""), ("reaper", "reaper-3", self.pooler.dsn, "gamma")]
        writers = sum(role == "writer" for role, *_ in tasks)
        for nth, (role, name, dsn, inbox) in enumerate(tasks):
            if self._roles and name not in self._roles:
                continue
            pooled = self.pooler is not None and dsn == self.pooler.dsn
            task = Task(
                role, name, dsn, direct, str(self.home), self._seed + nth, inbox, pooled, self._pace / writers,
                self.habits,
            )  # fmt: skip
            self.actors[name] = Actor(task, self._nursery, self.endings)
        watch = threading.Thread(target=self._watch, name="watch", daemon=True)
        watch.start()
        self._closing.callback(watch.join, 10)
        self._closing.callback(self._over.set)

    def of_role(self, role: str) -> list[Actor]:
        """Return the actors of a role."""
        return [actor for actor in self.actors.values() if actor.task.role == role]

    def leader_or_none(self) -> Actor | None:
        """Return the dispatcher that leads, if one does and the server tells."""
        try:
            with self.host.session() as connection:
                row = connection.execute(
                    "SELECT pid FROM mailroom.lease WHERE role = 'dispatcher' AND until > clock_timestamp()"
                ).fetchone()
        except psycopg.OperationalError:
            return None
        return next((one for one in self.of_role("dispatcher") if row is not None and one.pid == row[0]), None)

    def strike_leader(self, number: signal.Signals) -> None:
        """Send the leading dispatcher a signal."""
        if (leader := self.leader_or_none()) is not None:
            leader.signal(number)

    def standing_still(self, role: str) -> contextlib.AbstractContextManager[object]:
        """Stop a process of this role within: with both dispatchers stopped, each fault would await the other's end."""
        return self._standing_still if role == "dispatcher" else contextlib.nullcontext()

    def await_other_leader(self, pid: int, since: float, what: str) -> float:
        """Wait until another process than `pid` leads; returns and notes how long it took since `since`.

        How long it may take is what the report shows: on a busy machine it says nothing of Mailroom.
        """
        while (took := time.monotonic() - since) < HANDLED_WITHIN_S:
            leader = self.leader_or_none()
            if leader is not None and leader.pid != pid:
                break
            time.sleep(0.02)
        else:
            raise NotHandled(f"{what}: nobody leads after {took:.0f} s; {self.situation()}")
        self._note(what, took)
        return took

    def probe(
        self, topics: Sequence[str] = (), what: str = "probe", within_s: float | None = None,
        through: psycopg.Connection[Any] | None = None,
    ) -> float:  # fmt: skip
        """Send a message to each of the topics, else to all, and wait until they are handled; returns seconds.

        `through` is the session to use, if it has to be one that is open already; its loss raises psycopg's error.
        """
        began = time.monotonic()
        within_s = self._handled_within_s if within_s is None else within_s
        topics = topics or (INBOXES if self._roles else TARGETS)  # without those who read logs
        asked: dict[UUID, str] = {}
        missing: set[tuple[UUID, str]] = set()
        last = missing
        patience = _Patience(self, within_s, self._patience_s)
        with contextlib.ExitStack() as stack:
            session = through
            while True:
                try:
                    if session is None or session.closed:
                        session = stack.enter_context(self.host.session())
                        asked = {}  # of those before it is not known whether they were committed
                    if not asked:
                        asked = self._ask(session, topics)
                    seen = session.execute("SELECT mid, inbox FROM faults.seen WHERE mid = ANY (%s)", [list(asked)])
                    last, missing = missing, _receivers(asked) - set(seen.fetchall())
                    if not missing:
                        session.execute("DELETE FROM faults.seen WHERE mid = ANY (%s)", [list(asked)])
                        break
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    if through is not None:
                        raise
                    session = None
                if time.monotonic() - began > within_s and not patience.lasts(inbox for _, inbox in missing):
                    raise NotHandled(
                        f"{what}: not handled by {sorted(inbox for _, inbox in missing)} of "
                        f"{sorted(asked.values())} after {time.monotonic() - began:.0f} s; {self.situation()}"
                    )
                time.sleep(0.03)
        took = time.monotonic() - began
        self._note(f"{what} by {', '.join(sorted({inbox for _, inbox in last}))}" if took > LONG_S else what, took)
        return took

    def _note(self, what: str, took: float) -> None:
        with self._lock:
            self.liveness[what] = max(self.liveness.get(what, 0.0), took)

    def situation(self) -> str:
        """Say what is left, who waits for whom, and where the leader stands."""
        try:
            with self.host.session() as session:
                rows = session.execute(SITUATION).fetchall()
                lease = session.execute("SELECT pid, until > clock_timestamp(), state FROM mailroom.lease").fetchall()
                left = self._left(session)
        except psycopg.OperationalError as error:
            return f"the server: {error}"
        leader = self.leader_or_none()
        stacks = [] if leader is None else [f"{leader.task.name} at {place}" for place in leader.stacks()]
        return "\n    ".join([f"lease {lease}, left {left}", *(str(row) for row in rows), *stacks])

    @staticmethod
    def _ask(session: psycopg.Connection[Any], topics: Sequence[str]) -> dict[UUID, str]:
        asked = {uuid4(): topic for topic in topics}
        with session.transaction():
            for nth, (number, topic) in enumerate(asked.items()):
                key = f"{PROBE}{number}"
                Outbox().send(session, topic, {"id": str(number)}, key=key, id=number)
                session.execute(SENT, [[number], [topic], [key], [nth]])
        return asked

    # Scarcity.

    def processes(self) -> list[int]:
        """Return the processes that do the work: the server's and the actors'."""
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            ours = [actor.pid for actor in self.actors.values() if actor.pid and not actor.dead.is_set()]
            return [*ours, *family(self.host.postmaster())]
        return []  # the server is down

    @contextlib.contextmanager
    def scarcity(self, flush_s: float, *, busy: bool) -> Iterator[None]:
        """Have a slow disk and, with `busy`, cores that others want too."""
        before, self._flushes = self._flushes, [*self._flushes, flush_s]
        self._slow_down()
        try:
            with busy_cores(self.processes) if busy else contextlib.nullcontext():
                yield
        finally:
            self._flushes = before
            self._slow_down()

    def _slow_down(self) -> None:
        if self.host.disk is not None:
            self.host.disk.be(max(self._flushes, default=0))

    # At rest.

    def settle(self, within_s: float = 60.0) -> None:
        """Stop the writers and wait until everything that can be handled is."""
        self._rest(True)
        began = time.monotonic()
        patience = _Patience(self, within_s, self._patience_s)
        with self.host.session() as session:
            while left := self._left(session):
                if (took := time.monotonic() - began) > within_s and not patience.lasts():
                    raise NotHandled(f"not drained after {took:.0f} s: {left}; {self.situation()}")
                time.sleep(0.05)

    def go_on(self) -> None:
        """Let the writers write again."""
        self._rest(False)

    def check(self) -> list[Violation]:
        """Hold the ledgers against the invariants, at any moment when nobody is at work; returns what is violated."""
        with self.host.session() as session:
            acknowledged = history.read(self.home) if self._durable else ()
            return invariants.check(session, acknowledged, history.observed(self.home), timed=self.timed)

    def counted(self) -> dict[str, int]:
        """Count messages by where they are."""
        query = (
            "SELECT (SELECT count(*) FROM faults.w_ledger), (SELECT count(*) FROM faults.r_ledger), "
            "(SELECT count(*) FROM mailroom.inbox), (SELECT count(*) FROM mailroom.parked), "
            "(SELECT count(*) FROM mailroom.dead_letter), (SELECT count(*) FROM faults.d_ledger), "
            "(SELECT count(*) FROM faults.l_ledger), (SELECT count(*) FROM faults.rewound)"
        )
        with self.host.session() as session:
            row = session.execute(query).fetchone()
        assert row is not None
        return dict(
            zip(("sent", "reaped", "waiting", "parked", "dead", "deliveries", "read", "rewinds"), row, strict=True)
        )

    def handled(self) -> Counter[str]:
        """Count what each inbox has handled."""
        query = (
            "SELECT inbox, count(*) FROM faults.r_ledger GROUP BY inbox "
            "UNION ALL SELECT inbox, count(*) FROM faults.l_ledger GROUP BY inbox"
        )
        with self.host.session() as session:
            return Counter(dict(session.execute(query).fetchall()))

    def _rest(self, rests: bool) -> None:
        self._resting = rests
        for actor in (*self.of_role("writer"), *self.of_role("rewinder")):
            actor.rest(rests)

    @staticmethod
    def _left(session: psycopg.Connection[Any]) -> dict[str, int]:
        row = session.execute(
            "SELECT (SELECT count(*) FROM mailroom.outbox), (SELECT count(*) FROM mailroom.scheduled), "
            "(SELECT count(*) FROM mailroom.inbox i WHERE NOT EXISTS (SELECT FROM mailroom.key_state s "
            "WHERE s.inbox = i.inbox AND s.key = i.key AND s.retry_at = 'infinity')), "
            "(SELECT count(*) FROM pg_prepared_xacts), (SELECT count(*) FROM mailroom.outbox_executable), "
            f"(SELECT count(*) FROM ({invariants.UNREAD}) AS u)".encode()
        ).fetchone()
        assert row is not None
        names = ("outbox", "scheduled", "inboxes", "prepared", "executables", "logs")
        return {name: n for name, n in zip(names, row, strict=True) if n}

    def isolate(self, level: str) -> None:
        """Have one of two workers and reapers go by another isolation level from their next life on, which is now."""
        for actor in (*self.of_role("worker"), *self.of_role("reaper")):
            if actor.task.inbox in READERS:
                continue  # a log is read at READ COMMITTED only
            if actor.task.name.endswith("2") and actor.task.isolation != level:
                actor.task = replace(actor.task, isolation=level)
                actor.restart()

    def wake(self) -> None:
        """Let everybody go on who was stopped."""
        for actor in self.actors.values():
            actor.signal(signal.SIGCONT)

    def keep_logs(self, directory: str) -> None:
        """Copy what the processes and the server have logged."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for path in (*self.home.glob("*.log"), *self.host.directory.glob("server.log*")):
            shutil.copy(path, directory)

    # The watch.

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            try:
                # Bounded: a count that queues after a lock of the whole table would leave the orphan it waits for.
                with self.host.session(options=WATCH_OPTIONS) as session:
                    while not self._over.wait(WATCH_S):
                        self._end_orphans(session)
                        self._throttle(session)
            except (psycopg.OperationalError, psycopg.InterfaceError):
                continue

    def _throttle(self, session: psycopg.Connection[Any]) -> None:
        if self._looks % COUNT_EACH == 0:
            [(self._unread,)] = session.execute(
                f"SELECT count(*) FROM ({invariants.UNREAD} LIMIT {self._most_waiting + 1}) AS u".encode()
            ).fetchall()
        self._looks += 1
        [(waiting,)] = session.execute(
            "SELECT (SELECT count(*) FROM mailroom.outbox) + "
            "(SELECT count(*) FROM mailroom.inbox WHERE key NOT LIKE %s)",
            [f"{POISON}%"],
        ).fetchall()
        waiting += self._unread
        if self._resting or waiting > self._most_waiting:
            rests = True
        elif waiting < self._most_waiting // 2:
            rests = False
        else:
            return
        # Told again and again: a writer that was started anew does not know.
        for actor in (*self.of_role("writer"), *(self.of_role("rewinder") if self._resting else ())):
            actor.rest(rests)

    def _end_orphans(self, session: psycopg.Connection[Any]) -> None:
        """End transactions whose writer was killed between PREPARE and COMMIT PREPARED, one way or the other."""
        for gid, old in session.execute(
            "SELECT gid, prepared < clock_timestamp() - %s * interval '1 s' FROM pg_prepared_xacts "
            "WHERE database = current_database() AND gid LIKE %s",
            [ORPHAN_S, f"{GID}%"],
        ).fetchall():
            if old:
                verb = self.dice.choice(("COMMIT", "ROLLBACK"))
                with contextlib.suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState):
                    session.execute(f"{verb} PREPARED '{gid}'".encode())

    def _end_actors(self) -> None:
        for actor in self.actors.values():
            actor.end()


def _receivers(asked: Mapping[UUID, str]) -> set[tuple[UUID, str]]:
    """Return the pairs of message and inbox that are asked for."""
    return {(number, inbox) for number, topic in asked.items() for inbox in RECEIVERS.get(topic, [topic])}


class _Patience:
    """As long as those who have not handled a message handle others in each span, it may still come.

    How long that takes is the machine's affair, and for who reads a log also of a rewind: all of it may be ahead. Not
    for ever: two probes may wait for each other's ends, while everything else is handled.
    """

    def __init__(self, stage: Stage, span_s: float, most_s: float) -> None:
        self._stage = stage
        self._span_s = span_s
        self._handled: Counter[str] = Counter()
        self._until = 0.0
        self._ends = time.monotonic() + most_s

    def lasts(self, missing: Iterable[str] = ()) -> bool:
        """Tell whether to wait on: each of these inboxes has handled something; if none is named, any has."""
        now = time.monotonic()
        if now > self._ends:
            return False
        if now < self._until:
            return True
        try:
            handled = self._stage.handled()
        except psycopg.OperationalError:
            return False
        before, self._handled, self._until = self._handled, handled, now + self._span_s
        return handled != before and all(handled[inbox] > before[inbox] for inbox in missing)


@contextlib.contextmanager
def home_of_campaign() -> Iterator[Path]:
    """Give a directory that the server's account can reach, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mailroom-faults-") as directory:
        home = Path(directory)
        home.chmod(0o755)
        yield home
