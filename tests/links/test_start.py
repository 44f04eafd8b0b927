"""The start of a node: on servers that crash, restart, are promoted, copied and put back."""

import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from mailroom import Links, create_inbox
from mailroom.embedded import Binaries, Server
from mailroom.errors import LinkRefused
from mailroom.links.handshake.hello import Greeting, greeting
from mailroom.links.handshake.identity import JUMP, Party, Pinned, Place
from mailroom.links.restored import saying_copied, saying_moved, saying_restored, taking_new_id
from mailroom.links.start import PER_SECOND, Started, by_time, noting_place, reading_home, starting
from mailroom.order.clock import MAX_CLOCK, WARN_CLOCK, ClockOverflow
from mailroom.schema import migrate
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.postgres import FAST_SETTINGS
from tests.support.standby import standby_of
from tests.support.waiting import wait_until_blocked

NOTED = "system_id, database_oid, timeline, started_at"
READER = UUID(int=1)


def allow(node: Node, name: str = "south") -> None:
    """Let a reader in, as `mailroom link allow` does."""
    with node.connection.transaction():
        run(node.connection, noting_place(SCHEMA))
        node.connection.execute("INSERT INTO mailroom.link (name) VALUES (%s)", [name])
        node.connection.execute(
            "INSERT INTO mailroom.link_topic (topic, link) SELECT 'order.paid', number FROM mailroom.link "
            "WHERE name = %s",
            [name],
        )


def start(node: Node) -> Started:
    return transacted(node, starting(SCHEMA))


def transacted(node: Node, operation: Operation[T]) -> T:
    with node.connection.transaction():
        return run(node.connection, operation)


def clock(node: Node) -> int:
    return int(node.value("SELECT last_value FROM mailroom.clock"))


def beyond(node: Node, clock: int) -> int:
    """Return where a node jumps whose clock may have been that far."""
    return max(clock + JUMP, by_time(node.value("SELECT pg_postmaster_start_time()")))


def state(node: Node) -> Any:
    """Return what a start may change."""
    [row] = node.rows(f"SELECT xmin::text, clock_ceiling, life, {NOTED} FROM mailroom.node")
    return row


def greet(node: Node) -> Greeting:
    """Say hello as a reader."""
    party = Party("south", READER, Place(1, 2, 3, datetime(2026, 1, 1, tzinfo=UTC)))
    return transacted(node, greeting(SCHEMA, "north", party, Pinned(), uuid4()))


# -- The rule ---------------------------------------------------------------------------------------------------------


def test_new_node_notes_its_place_and_its_clock_does_not_jump(node: Node) -> None:
    for _ in range(2):
        assert start(node) == Started(0)
        home = run(node.connection, reading_home(SCHEMA))
        assert home.noted == home.found


def test_node_without_links_jumps_in_a_new_place_and_is_at_home_there(node: Node) -> None:
    start(node)
    node.allow_clocks(1_000)
    for other in ("timeline = 0", "database_oid = 1", "system_id = NULL"):
        expected = beyond(node, max(clock(node), 1_000))
        node.connection.execute(f"UPDATE mailroom.node SET {other}".encode())
        assert start(node) == Started(expected, jumped=True), other
        home = run(node.connection, reading_home(SCHEMA))
        assert home.noted == home.found
        assert not start(node).jumped


@pytest.mark.parametrize("links", ["link", "origin"])
def test_first_link_does_not_swallow_the_jump_of_a_node_that_was_put_back(node: Node, links: str) -> None:
    start(node)
    node.allow_clocks(1_000)
    node.connection.execute("UPDATE mailroom.node SET timeline = 0")
    life = node.value("SELECT life FROM mailroom.node")
    with node.connection.transaction():
        if links == "link":
            Links().allow(node.connection, "south", actor="ada")
        else:
            Links().add(node.connection, "north", actor="ada")
    assert (clock(node), node.value("SELECT life FROM mailroom.node") == life) == (beyond(node, 1_000), False)
    assert not start(node).jumped


def test_server_that_hides_its_control_file_tells_a_start_by_its_time(node: Node) -> None:
    node.connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM public")
    role = f"{node.connection.info.dbname}_managed"
    node.connection.execute(f"CREATE ROLE {role}".encode())
    try:
        for what in ("ALL ON SCHEMA mailroom", "ALL ON ALL TABLES IN SCHEMA mailroom",
                     "ALL ON ALL SEQUENCES IN SCHEMA mailroom"):  # fmt: skip
            node.connection.execute(f"GRANT {what} TO {role}".encode())
        node.connection.execute(f"SET ROLE {role}".encode())
        assert start(node) == Started(0)
        assert not start(node).jumped
        node.connection.execute("UPDATE mailroom.node SET started_at = started_at - interval '1 microsecond'")
        assert start(node).jumped
        assert not start(node).jumped
        with pytest.raises(psycopg.errors.InsufficientPrivilege):  # a link needs to know more
            allow(node)
    finally:
        node.connection.execute("RESET ROLE")
        node.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_first_link_notes_the_place_and_a_later_one_does_not(node: Node) -> None:
    allow(node)
    home = run(node.connection, reading_home(SCHEMA))
    assert home.noted == home.found
    assert not home.is_elsewhere
    node.connection.execute("UPDATE mailroom.node SET timeline = 77")
    allow(node, "west")
    assert node.value("SELECT timeline FROM mailroom.node") == 77


def test_at_the_place_noted_nothing_is_written_and_the_clock_does_not_jump(node: Node) -> None:
    allow(node)
    node.allow_clocks(1_000)
    before = state(node)
    assert start(node) == Started(1_000)
    assert state(node) == before


def test_after_another_start_the_clock_jumps_beyond_all_that_was_given_out(node: Node) -> None:
    allow(node)
    for other, sequence, ceiling in (
        ("timeline = timeline - 1", 5_000, 1_000),
        ("started_at = started_at - interval '1 microsecond'", 1_000, 5_000),
        ("timeline = timeline - 1", 2**52, 2**51),
        ("timeline = timeline - 1", 2**52, 2**53),
    ):
        node.allow_clocks(ceiling)
        node.connection.execute("SELECT setval('mailroom.clock', %s)", [sequence])
        node.connection.execute(f"UPDATE mailroom.node SET {other}".encode())
        life = node.value("SELECT life FROM mailroom.node")
        clock_after = beyond(node, max(sequence, ceiling))
        assert start(node) == Started(clock_after, jumped=True)
        assert node.rows("SELECT clock_ceiling, life = %s FROM mailroom.node", life) == [(clock_after, False)]
        assert clock(node) == clock_after
        home = run(node.connection, reading_home(SCHEMA))
        assert home.noted == home.found
        assert not start(node).jumped


def test_later_starts_have_higher_clocks_as_far_as_the_server_s_time_is_right() -> None:
    clocks = {
        datetime(2025, 12, 31, tzinfo=UTC): 0,
        datetime(2026, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC): 3 * PER_SECOND // 2,
        datetime(9999, 1, 1, tzinfo=UTC): 500 * 365 * 86_400 * PER_SECOND,
    }
    assert {started_at: by_time(started_at) for started_at in clocks} == clocks
    assert max(clocks.values()) < WARN_CLOCK


def test_node_that_only_reads_jumps_too(node: Node) -> None:
    with node.connection.transaction():
        run(node.connection, noting_place(SCHEMA))
        node.connection.execute("INSERT INTO mailroom.origin (name) VALUES ('north')")
    assert not start(node).jumped
    node.connection.execute("UPDATE mailroom.node SET timeline = 0")
    assert start(node).jumped


def test_jump_is_durable_when_the_start_is_over(node: Node) -> None:
    allow(node)
    node.connection.execute("UPDATE mailroom.node SET timeline = 0")
    node.connection.execute("SET synchronous_commit = off")
    with node.connection.transaction():
        run(node.connection, starting(SCHEMA))
        assert node.value("SELECT current_setting('synchronous_commit')") == "on"


def test_start_waits_for_a_delivery_under_way_and_counts_what_it_gave_out(node: Node, connect: Connect) -> None:
    node.inbox("shipping", "order.paid")
    allow(node)
    node.allow_clocks(100)
    node.connection.execute("UPDATE mailroom.node SET timeline = 0")
    node.send("order.paid")
    other = connect(autocommit=True)
    with ThreadPoolExecutor(1) as thread:
        with node.connection.transaction():
            assert node.deliver().clock == 1
            node.connection.execute("UPDATE mailroom.node SET clock_ceiling = 7000")
            waiting = thread.submit(start, Node(node.dsn, other))
            with connect(autocommit=True) as observer:
                wait_until_blocked(observer, other.info.backend_pid)
        assert waiting.result() == Started(beyond(node, 7_000), jumped=True)


def test_start_at_the_end_of_all_clocks_says_so(node: Node) -> None:
    allow(node)
    node.allow_clocks(MAX_CLOCK - JUMP + 1)
    node.connection.execute("UPDATE mailroom.node SET timeline = 0")
    with pytest.raises(ClockOverflow):
        start(node)


def test_dispatcher_jumps_before_it_stamps(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    allow(node)
    node.send("order.paid")
    node.deliver_all()
    before = node.value("SELECT max(clock) FROM mailroom.inbox")
    node.connection.execute("UPDATE mailroom.node SET timeline = 0")
    node.send("order.paid")
    node.deliver_all()
    assert node.value("SELECT max(clock) FROM mailroom.inbox") > before + JUMP


# -- Elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", ["database_oid = database_oid - 1", "system_id = system_id - 1"])
def test_node_that_is_elsewhere_lets_no_reader_in_before_somebody_says_why(node: Node, other: str) -> None:
    allow(node)
    greet(node)
    node.connection.execute(f"UPDATE mailroom.node SET {other}".encode())
    before = node.rows("SELECT system_id, database_oid FROM mailroom.node")
    first = start(node)
    assert (first.jumped, first.moved) == (True, True)
    # And at each start: nothing else tells the starts of two databases of one server apart.
    assert start(node).clock == first.clock + JUMP
    assert node.rows("SELECT system_id, database_oid FROM mailroom.node") == before
    with pytest.raises(LinkRefused, match="mailroom node moved"):
        greet(node)

    life = node.value("SELECT life FROM mailroom.node")
    assert transacted(node, saying_moved(SCHEMA, actor="ada", why="a new server"))
    assert clock(node) == first.clock + 2 * JUMP
    assert node.value("SELECT life FROM mailroom.node") != life
    assert greet(node).in_doubt
    assert not start(node).jumped
    assert node.rows("SELECT actor, action, reason FROM mailroom.audit") == [("ada", "node moved", "a new server")]
    assert not transacted(node, saying_moved(SCHEMA, actor="ada"))


def test_copy_gets_an_id_of_its_own_and_nothing_of_the_links_that_it_was_copied_with(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    allow(node)
    node.send("order.paid")
    node.deliver_all()
    node.connection.execute("INSERT INTO mailroom.origin (name) VALUES ('west')")
    node.connection.execute("INSERT INTO mailroom.known VALUES (1, gen_random_uuid())")
    node.connection.execute("UPDATE mailroom.node SET database_oid = 0, incarnation = 3")
    id = node.value("SELECT id FROM mailroom.node")

    tried = transacted(node, saying_copied(SCHEMA, actor="ada", dry_run=True))
    assert (tried.before, tried.id, tried.links, tried.rows, tried.origins) == (id, id, 1, 1, 1)
    assert node.value("SELECT id FROM mailroom.node") == id
    assert not node.rows("SELECT FROM mailroom.audit")

    done = transacted(node, saying_copied(SCHEMA, actor="ada"))
    assert (done.before, done.links, done.rows, done.origins) == (id, 1, 1, 1)
    assert done.id == node.value("SELECT id FROM mailroom.node") != id
    for table in ("link", "link_topic", "transit", "origin", "receipt", "known"):
        assert node.value(f"SELECT count(*) FROM mailroom.{table}") == 0
    assert node.rows(f"SELECT incarnation, {NOTED} FROM mailroom.node") == [(1, None, None, None, None)]
    assert len(node.delivered()) == 1  # what was delivered here stays
    assert node.rows("SELECT action, key FROM mailroom.audit") == [("node new-id", str(done.id))]
    allow(node)
    assert not start(node).jumped


def test_restored_node_takes_a_new_incarnation_beyond_those_that_readers_have_seen(node: Node) -> None:
    allow(node)
    node.allow_clocks(1_000)
    life = node.value("SELECT life FROM mailroom.node")
    assert transacted(node, saying_restored(SCHEMA, above=7, actor="ada", dry_run=True)) == 8
    assert node.rows("SELECT incarnation, clock_ceiling FROM mailroom.node") == [(1, 1_000)]
    assert clock(node) == 0
    assert transacted(node, saying_restored(SCHEMA, above=7, actor="ada", why="snapshot put back")) == 8
    assert clock(node) == beyond(node, 1_000) + 1
    assert node.rows("SELECT incarnation, clock_ceiling, life = %s FROM mailroom.node", life) == [
        (8, clock(node), False)
    ]
    assert node.rows("SELECT actor, action FROM mailroom.audit") == [("ada", "node restored")]


def test_node_that_is_elsewhere_cannot_be_said_to_be_restored_only(node: Node) -> None:
    allow(node)
    node.connection.execute("UPDATE mailroom.node SET database_oid = 0")
    with pytest.raises(Exception, match="mailroom node moved"):
        transacted(node, saying_restored(SCHEMA, actor="ada"))


def test_clones_of_the_tests_template_are_nodes_of_their_own(dsn: str, target_dsn: str) -> None:
    with psycopg.connect(dsn) as one, psycopg.connect(target_dsn) as other:
        ids = {Node(dsn, each).value("SELECT id FROM mailroom.node") for each in (one, other)}
    assert len(ids) == 2


# -- Real servers -----------------------------------------------------------------------------------------------------


def settle(dsn: str) -> None:
    """Make a node with an inbox and a link, and deliver a message."""
    with psycopg.connect(dsn) as connection:
        migrate(connection)
        create_inbox(connection, "shipping", ["order.paid"])
    with psycopg.connect(dsn, autocommit=True) as connection:
        node = Node(dsn, connection)
        allow(node)
        node.send("order.paid", key="first")
        node.deliver_all()


def test_node_knows_where_it_was_made(private_server: Server) -> None:
    """Also by `alembic upgrade --sql`: a backup from before its first start is then another start."""
    with psycopg.connect(private_server.dsn(), autocommit=True) as connection, connection.transaction():
        migrate(connection)
        home = run(connection, reading_home(SCHEMA))
    assert home.noted == home.found


def again(dsn: str, key: str) -> tuple[int, bool, Any]:
    """Send a message and deliver it after a start; return its clock, whether it jumped, and the noted place."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        node = Node(dsn, connection)
        before = node.value("SELECT life FROM mailroom.node")
        node.send("order.paid", key=key)
        node.deliver_all()
        stamped = node.value("SELECT max(clock) FROM mailroom.inbox")
        home = run(connection, reading_home(SCHEMA))
        return stamped, home.life != before, home


@pytest.fixture
def served(private_server: Server) -> Server:
    """A server with a node that has a link."""
    settle(private_server.dsn())
    return private_server


def last_clock(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return int(Node(dsn, connection).value("SELECT greatest(last_value, clock_ceiling) FROM mailroom.clock, "
                                               "mailroom.node"))  # fmt: skip


@pytest.mark.slow
def test_clean_restart_is_another_start(served: Server) -> None:
    given_out = last_clock(served.dsn())
    served.stop()
    served.start()
    clock, jumped, home = again(served.dsn(), "second")
    assert (jumped, home.noted) == (True, home.found)
    assert clock > given_out + JUMP
    # A dispatcher that connects again, to the same server, does not jump.
    _, jumped, _ = again(served.dsn(), "third")
    assert not jumped


@pytest.mark.slow
def test_crash_that_undoes_asynchronous_commits_reuses_no_clock(served: Server) -> None:
    dsn = served.dsn()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        connection.execute("ALTER SYSTEM SET wal_writer_flush_after = '1GB'")
        connection.execute("SELECT pg_reload_conf()")
        node = Node(dsn, connection)
        node.connection.execute(
            "DELETE FROM mailroom.link_topic"
        )  # nothing leaves, so nothing makes a delivery durable
        for nth in range(3):
            node.send("order.paid", key=str(nth))
        node.deliver_all()
        stamped = node.value("SELECT max(clock) FROM mailroom.inbox")
    kill(served)
    served.start()
    with psycopg.connect(served.dsn(), autocommit=True) as connection:
        kept = Node(dsn, connection).value("SELECT max(clock) FROM mailroom.inbox")
    clock, jumped, _ = again(served.dsn(), "after")
    assert jumped
    assert clock > max(stamped, kept) + JUMP


def kill(server: Server) -> None:
    """Kill the server as a crash of the machine does."""
    pid = int((server.directory / "data" / "postmaster.pid").read_text().splitlines()[0])
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    for each in (pid, *map(int, children)):
        subprocess.run(["kill", f"-{int(signal.SIGKILL)}", str(each)], check=False)


@pytest.mark.slow
def test_promoted_standby_jumps_and_is_at_the_same_place_of_a_later_timeline(
    served: Server, server_home: Path, binaries: Binaries
) -> None:
    given_out = last_clock(served.dsn())
    with standby_of(served, server_home / "standby", binaries) as standby:
        with psycopg.connect(served.dsn(), autocommit=True) as connection:
            connection.execute("CREATE TABLE awaited ()")  # what is inserted stands behind the header of a page then
            standby.await_replay(connection)
            [(system_id, timeline)] = connection.execute("SELECT system_id, timeline FROM mailroom.node").fetchall()
        standby.promote()
        clock, jumped, home = again(standby.dsn, "second")
        assert jumped
        assert clock > given_out + JUMP
        assert (home.noted, home.is_elsewhere) == (home.found, False)
        assert (home.found.system_id, home.found.timeline) == (system_id, timeline + 1)


@pytest.mark.slow
def test_copy_of_the_data_directory_is_the_same_place_and_another_start(
    served: Server, server_home: Path, binaries: Binaries
) -> None:
    """Nothing else tells it apart. Two that run at once take the reader's link from each other."""
    served.stop()
    copy = copied(served, server_home / "copy", binaries)
    served.start()
    with copy:
        clock, jumped, home = again(copy.dsn(), "second")
        assert (jumped, home.is_elsewhere) == (True, False)
        assert clock > JUMP


def copied(server: Server, directory: Path, binaries: Binaries) -> Server:
    """Return a server on a copy of a stopped one's directory."""
    subprocess.run(["cp", "-a", server.directory, directory], check=True)
    return Server(directory, binaries=binaries, settings=FAST_SETTINGS | {"synchronous_commit": "on"})


@pytest.mark.slow
def test_directory_that_is_put_back_is_another_start(served: Server, server_home: Path) -> None:
    """T-48, T-49."""
    served.stop()
    subprocess.run(["cp", "-a", served.directory / "data", server_home / "backup"], check=True)
    served.start()
    lost, _, _ = again(served.dsn(), "lost")
    served.stop()
    shutil.rmtree(served.directory / "data")
    subprocess.run(["cp", "-a", server_home / "backup", served.directory / "data"], check=True)
    served.start()
    clock, jumped, home = again(served.dsn(), "second")
    assert (jumped, home.is_elsewhere) == (True, False)
    # Both starts jumped from the same clock.
    assert clock > lost


@pytest.fixture
def restored(served: Server, binaries: Binaries) -> str:
    """The URL of a database of the same server, into which a dump of the node was restored."""
    dumped = subprocess.run([binaries.path / "pg_dump", served.dsn()], check=True, capture_output=True).stdout
    with psycopg.connect(served.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE restored TEMPLATE template0 ENCODING 'UTF8'")
    url = re.sub(r"/mailroom$", "/restored", served.dsn())
    psql = [str(binaries.path / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", url]
    subprocess.run(psql, input=dumped, check=True, capture_output=True)
    return url


@pytest.mark.slow
def test_dump_restored_into_another_database_is_elsewhere(served: Server, restored: str) -> None:
    """T-48, T-53."""
    given_out = last_clock(served.dsn())
    clock, jumped, home = again(restored, "second")
    assert (jumped, home.is_elsewhere) == (True, True)
    assert clock > given_out + JUMP
    with psycopg.connect(restored, autocommit=True) as connection:
        node = Node(restored, connection)
        with pytest.raises(LinkRefused, match="mailroom node new-id"):
            greet(node)
        transacted(node, taking_new_id(SCHEMA))
        assert not run(connection, reading_home(SCHEMA)).is_elsewhere
