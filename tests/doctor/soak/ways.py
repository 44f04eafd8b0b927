"""The ways in which a node is broken, what names each of them, and what mends it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import psycopg

from tests.doctor.soak.modes import FAIL, HANG
from tests.doctor.soak.scene import DAEMON, DAEMONS, Scene
from tests.faults.pooler import Pooler
from tests.support.port import free_port

# Ages from which on it counts, so that nobody has to wait for long. Under load none of them is reached.
LIMITS = (
    *("--snapshot-s", "5", "--lock-s", "2", "--unled-s", "4", "--lease-s", "2", "--batch-s", "6", "--silent-s", "4"),
    *("--wal-bytes", "2000000"),
)


@dataclass(frozen=True)
class Way:
    """A way to break a node.

    `breaking` breaks it, and mends it when its context ends; before that the command of the finding is run if it is
    to mend it, `by_command`. Each of `findings` and `alerts` has to name it. It may give a DSN for the doctor to use.
    """

    name: str
    breaking: Callable[[Scene], AbstractContextManager[str | None]]
    findings: tuple[str, ...]
    alerts: tuple[str, ...] = field(default=(), kw_only=True)
    by_command: bool = field(default=False, kw_only=True)


@contextmanager
def leader_killed(scene: Scene) -> Iterator[None]:
    """Kill the leader, and then the one that has taken over: a single one leaves no trace."""
    for _ in DAEMONS:
        scene.end(scene.leader())
    yield
    for name in DAEMONS:
        scene.daemon(name)


@contextmanager
def leader_stopped(scene: Scene) -> Iterator[None]:
    """Pause the leader, and then the one that has taken over."""
    first = scene.leader()
    scene.signal(first, signal.SIGSTOP)
    [other] = set(DAEMONS) - {first}
    scene.await_leader(other)
    scene.signal(other, signal.SIGSTOP)
    yield
    for name in DAEMONS:
        scene.signal(name, signal.SIGCONT)


@contextmanager
def _session(scene: Scene, *statements: str) -> Iterator[None]:
    """Have a user's session in a transaction; the doctor's command ends it."""
    connection = psycopg.connect(scene.dsn, application_name="report")
    try:
        for statement in statements:
            connection.execute(statement.encode())
        yield
    finally:
        connection.close()


def old_snapshot(scene: Scene) -> AbstractContextManager[None]:
    """Leave a transaction open."""
    return _session(scene, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT")


def locked(scene: Scene) -> AbstractContextManager[None]:
    """Lock the outbox."""
    return _session(scene, "LOCK TABLE mailroom.outbox")


@contextmanager
def _statement(scene: Scene, broken: str, mended: str = "") -> Iterator[None]:
    scene.execute(broken)
    yield
    if mended:
        scene.execute(mended)


def by_statement(broken: str, mended: str = "") -> Callable[[Scene], AbstractContextManager[None]]:
    """Return what breaks a node by a statement, and mends it by another one."""
    return lambda scene: _statement(scene, broken, mended)


@contextmanager
def prepared(scene: Scene) -> Iterator[None]:
    """Leave a prepared transaction."""
    with psycopg.connect(scene.dsn) as connection:
        connection.execute("INSERT INTO done (key) VALUES ('prepared')")
        connection.execute("PREPARE TRANSACTION 'left over'")
    yield


@contextmanager
def poisoned(scene: Scene) -> Iterator[None]:
    """Send a message that the handler fails on."""
    scene.mode(FAIL, on=True)
    scene.sent("order.paid", FAIL, "poison")
    yield
    scene.mode(FAIL, on=False)
    scene.mailroom("parked", "replay", "orders", "--all")


@contextmanager
def hanging(scene: Scene) -> Iterator[None]:
    """Have a handler hang."""
    scene.hold()
    yield
    scene.mode(HANG, on=False)


@contextmanager
def worker_stopped(scene: Scene) -> Iterator[None]:
    """Pause a worker that has a message in hand."""
    scene.hold()
    scene.signal("orders", signal.SIGSTOP)
    yield
    scene.mode(HANG, on=False)
    scene.signal("orders", signal.SIGCONT)


@contextmanager
def pooled(scene: Scene) -> Iterator[str]:
    """Have the daemons connect through a pooler in transaction mode."""
    home = scene.home / f"pooler-{free_port()}"
    home.mkdir(mode=0o755)
    pooler = Pooler(home, scene.dsn, free_port())
    pooler.start()
    for name in DAEMONS:
        scene.daemon(name, dsn=pooler.dsn)
    yield pooler.dsn
    for name in DAEMONS:
        scene.daemon(name)
    pooler.kill()


@contextmanager
def unsubscribed(scene: Scene) -> Iterator[None]:
    """Take a subscription away: what is sent there becomes a dead letter."""
    scene.execute("DELETE FROM mailroom.subscription WHERE inbox = 'orders'")
    yield
    scene.execute("INSERT INTO mailroom.subscription (topic, inbox) VALUES ('order.paid', 'orders')")
    scene.mailroom("dead-letter", "requeue", "--all")


@contextmanager
def detached(scene: Scene) -> Iterator[None]:
    """Detach the partition of an inbox."""
    scene.execute("ALTER TABLE mailroom.inbox DETACH PARTITION mailroom.inbox_orders")
    yield
    scene.execute("ALTER TABLE mailroom.inbox ATTACH PARTITION mailroom.inbox_orders FOR VALUES IN ('orders')")
    scene.mailroom("dead-letter", "requeue", "--all")


@contextmanager
def clock_beyond(scene: Scene) -> Iterator[None]:
    """Set the clock above its ceiling while no daemon is there: one that delivers raises the ceiling at once."""
    for name in DAEMONS:
        scene.end(name, signal.SIGTERM)
    scene.execute(
        "SELECT setval('mailroom.clock', greatest(c.last_value, n.clock_ceiling) + 1) "
        "FROM mailroom.clock AS c, mailroom.node AS n"
    )
    yield
    for name in DAEMONS:
        scene.daemon(name)


SEQUENCE = "'mailroom.audit_id_seq'"
WAYS = (
    Way("leader killed", leader_killed, ("M022",), alerts=("NoLeader",)),
    Way("leader stopped", leader_stopped, ("M024",), alerts=("NoLeader",)),
    Way("old snapshot", old_snapshot, ("M001",), by_command=True),
    Way("prepared transaction", prepared, ("M002",), by_command=True),
    Way(
        "forgotten slot", by_statement("SELECT pg_create_physical_replication_slot('forgotten', true)"),
        ("M003",), by_command=True,
    ),
    Way("LOCK TABLE by a user", locked, ("M005", "M006"), by_command=True),
    # What cannot be delivered meanwhile becomes a dead letter.
    Way("partition detached", detached, ("M013", "M041"), alerts=("DeadLetters",)),
    Way(
        "trigger off", by_statement("ALTER TABLE mailroom.outbox DISABLE TRIGGER doorbell"),
        ("M016",), by_command=True,
    ),
    Way("key poisoned", poisoned, ("M040",), alerts=("ParkedKeys",)),
    Way("handler hangs", hanging, ("M025",), alerts=("Stalled",)),
    Way(
        "wrong grant", by_statement(f"REVOKE DELETE ON mailroom.outbox FROM {DAEMON}"),
        ("M037",), by_command=True,
    ),
    Way(
        "row security", by_statement("ALTER TABLE mailroom.outbox ENABLE ROW LEVEL SECURITY"),
        ("M038",), by_command=True,
    ),
    Way("pooler in between", pooled, ("M032",)),
    Way("worker SIGSTOPped", worker_stopped, ("M025",)),
    Way("clock at its ceiling", clock_beyond, ("M020",)),
    Way(
        "autovacuum off", by_statement("ALTER SYSTEM SET autovacuum = off; SELECT pg_reload_conf()"),
        ("M007",), by_command=True,
    ),
    Way(
        "sequence behind its table", by_statement(f"SELECT setval({SEQUENCE}, 1, false)"),
        ("M017",), by_command=True,
    ),
    Way(
        "synchronous standby gone",
        by_statement("ALTER SYSTEM SET synchronous_standby_names = 'gone'; SELECT pg_reload_conf()"),
        ("M050",), by_command=True,
    ),
    Way("limit of a role", by_statement(f"ALTER ROLE {DAEMON} CONNECTION LIMIT 1"), ("M030",), by_command=True),
    Way("subscription missing", unsubscribed, ("M041",), alerts=("DeadLetters",)),
)  # fmt: skip
