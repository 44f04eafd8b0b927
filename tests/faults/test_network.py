"""The campaign's network: where it cuts decides whether a transaction has committed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.faults.network import Network, Trouble
from tests.support.databases import Connect
from tests.support.waiting import WITHIN_S, eventually


@pytest.fixture
def network(dsn: str) -> Iterator[Network]:
    server = urlsplit(dsn)
    network = Network(server.hostname or "", server.port or 0, seed=1)
    yield network
    network.close()


@pytest.mark.parametrize(
    ("kind", "committed"), [("cut before COMMIT", False), ("half of COMMIT", False), ("COMMIT answer lost", True)]
)
def test_a_commit_is_lost_on_one_side_of_the_server(
    dsn: str, connect: Connect, network: Network, kind: str, committed: bool
) -> None:
    observer = connect(autocommit=True)
    observer.execute("CREATE TABLE note (n int)")
    network.be(Trouble(kind))
    writer = psycopg.connect(network.dsn(dsn))
    writer.execute("INSERT INTO note VALUES (1)")
    with pytest.raises(psycopg.OperationalError):
        writer.commit()
    writer.close()
    assert network.done[kind] == 1
    eventually(lambda: not _others(observer))
    assert observer.execute("SELECT count(*) FROM note").fetchone() == (int(committed),)


def test_a_black_hole_gives_back_what_it_held(dsn: str, network: Network) -> None:
    with ThreadPoolExecutor(1) as thread, psycopg.connect(network.dsn(dsn), autocommit=True) as through:
        network.be(Trouble("black hole"))
        answer = thread.submit(through.execute, "SELECT 1")
        eventually(lambda: network.done["black hole"])
        assert not answer.done()
        network.be(Trouble())
        assert answer.result(WITHIN_S).fetchone() == (1,)


def _others(observer: psycopg.Connection[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return observer.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    ).fetchall()
