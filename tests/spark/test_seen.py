"""A worker for a driver elsewhere sees the same node on the same server, as far as the driver saw it, or fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

from mailroom.embedded import Binaries, Server
from mailroom.errors import ConfigurationError
from mailroom.schema import migrate
from mailroom.session import settings
from spark_jobs import drain as drains
from spark_jobs import seen
from spark_jobs.node import Node
from spark_jobs.read.inbox_rows import Chosen
from spark_jobs.read.inbox_source import InboxReader
from spark_jobs.seen import Seen, demand_the_same
from spark_jobs.write.commit import commit
from spark_jobs.write.ledger import SparkBatch
from spark_jobs.write.staging import stage
from tests.spark.frames import SHAPE, batches
from tests.support import node as nodes
from tests.support.standby import standby_of
from tests.support.waiting import eventually


@pytest.fixture
def elsewhere(dsn: str) -> Iterator[str]:
    """A copy of the node in another database of the same server, as a backup that was put back beside it."""
    parts = conninfo.conninfo_to_dict(dsn)
    name = f"{parts['dbname']}_copy"[-63:]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        there = conninfo.make_conninfo("", **(parts | {"dbname": name}))
        with psycopg.connect(there) as copy:
            migrate(copy)
            [(id,)] = connection.execute("SELECT id FROM mailroom.node").fetchall()
            copy.execute("UPDATE mailroom.node SET id = %s", [id])
        try:
            yield there
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def variable(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The node by a variable, as driver and executors have it."""
    monkeypatch.setenv("ORDERS_SECRET_DSN", dsn)
    return Node(variable="ORDERS_SECRET_DSN")


def test_every_task_compares_where_it_is(
    variable: Node, dsn: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Reading, staging and draining; and so does the commit of a driver that was started again elsewhere."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        node = nodes.Node(dsn, connection)
        node.inbox("shipping")
        node.send("shipping", 1)
        node.deliver_all()
    with psycopg.connect(elsewhere, autocommit=True) as connection:
        nodes.Node(elsewhere, connection).inbox("shipping")
    reader = InboxReader(variable, "shipping", None, None, None, Chosen())
    [planned] = reader.partitions()
    pinned = variable.check()
    batch = SparkBatch("job")
    staged = stage(pinned, batch, SHAPE, batches(0, 10))
    tasks: dict[str, Callable[[], object]] = {
        "read": lambda: list(reader.read(planned)),
        "stage": lambda: stage(pinned, batch, SHAPE, batches(0, 10)),
        "drain": lambda: drains.drain(pinned, "shipping", str(tmp_path)),
        "commit": lambda: commit(pinned, batch, SHAPE, [staged]),
    }
    monkeypatch.setenv("ORDERS_SECRET_DSN", elsewhere)
    for task in tasks.values():
        with pytest.raises(ConfigurationError, match=r"reaches another database than the driver: node .* in database"):
            task()
    monkeypatch.setenv("ORDERS_SECRET_DSN", dsn)
    assert sum(batch.num_rows for batch in reader.read(planned)) == 1
    assert commit(pinned, batch, SHAPE, [staged]).messages == 10


def test_another_node_and_server_are_told(variable: Node) -> None:
    pinned = variable.pinned()
    assert pinned.seen is not None
    pinned.connect("test").close()
    others = {"node": replace(pinned.seen, node="another"), "server": replace(pinned.seen, server=1)}
    for name, other in others.items():
        moved = replace(pinned, seen=other)
        with pytest.raises(ConfigurationError, match=f"reaches another {name} than the driver"):
            moved.connect("test")


def test_an_older_state_of_the_same_server_is_told(variable: Node) -> None:
    pinned = variable.pinned()
    assert pinned.seen is not None
    later = replace(pinned, seen=replace(pinned.seen, durable=pinned.seen.durable + 2**40))
    with pytest.raises(ConfigurationError, match="reaches an older state of the server"):
        later.connect("test")
    # A crash takes back what was not durable, and the server is the same all the same.
    replace(pinned, seen=replace(pinned.seen, visible=pinned.seen.visible + 2**40)).connect("test").close()


@pytest.mark.parametrize("catches_up", [True, False])
def test_a_standby_catches_up_or_is_refused(variable: Node, monkeypatch: pytest.MonkeyPatch, catches_up: bool) -> None:
    planned = Seen("node", 1, 2, visible=100, durable=90)
    replayed, pauses = [95, 99, 100 if catches_up else 99], list[float]()

    def now(*_: object) -> tuple[Seen, bool]:
        at = replayed.pop(0) if len(replayed) > 1 else replayed[0]
        return replace(planned, visible=at, durable=at), True

    monkeypatch.setattr(seen, "run", now)
    with psycopg.connect(settings.dsn(variable.connection_string()), autocommit=True) as connection:
        demand = partial(
            demand_the_same, connection, "mailroom", planned, clock=lambda: len(pauses) * 1.0, pause=pauses.append
        )
        if catches_up:
            demand()
            assert len(pauses) == 2
        else:
            with pytest.raises(ConfigurationError, match=r"a standby that lags behind.*read-write"):
                demand()
            assert len(pauses) == 60


def test_real_standby_that_lags_is_refused_and_read_once_it_has_caught_up(
    private_server: Server, server_home: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver plans 60 messages at the primary; executors that saw none of them would report nothing wrong."""
    dsn = private_server.dsn()
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction():
            migrate(connection)
        node = nodes.Node(dsn, connection)
        node.inbox("shipping")
        with standby_of(private_server, server_home / "standby", binaries) as standby:
            standby.await_replay(connection)
            with psycopg.connect(standby.dsn, autocommit=True) as there:
                there.execute("SELECT pg_wal_replay_pause()")
                eventually(lambda: there.execute("SELECT pg_get_wal_replay_pause_state()").fetchone() == ("paused",))
                for nth in range(60):
                    node.send("shipping", nth)
                node.deliver_all()
                monkeypatch.setenv("ORDERS_SECRET_DSN", dsn)
                reader = InboxReader(Node(variable="ORDERS_SECRET_DSN"), "shipping", None, None, None, Chosen())
                planned = reader.partitions()
                monkeypatch.setenv("ORDERS_SECRET_DSN", f"{standby.dsn} target_session_attrs=any")
                with monkeypatch.context() as hasty:
                    hasty.setattr(seen, "CAUGHT_UP_WITHIN_S", 0)
                    with pytest.raises(ConfigurationError, match="standby that lags behind"):
                        list(reader.read(planned[0]))
                there.execute("SELECT pg_wal_replay_resume()")
                assert sum(batch.num_rows for each in planned for batch in reader.read(each)) == 60


def test_of_several_hosts_the_primary_is_taken_unless_told() -> None:
    several = "host=a,b dbname=orders"
    assert "target_session_attrs=read-write" in settings.session_dsn(several, "spark read")
    told = settings.session_dsn(f"{several} target_session_attrs=any", "spark read")
    assert "target_session_attrs=any" in told
    assert "read-write" not in told
