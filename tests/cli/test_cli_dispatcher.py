"""`mailroom dispatcher`."""

import signal
import socket
from urllib.error import URLError
from urllib.request import urlopen

from tests.support.command import done, json_of, mailroom, process
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually


def node_of(dsn: str, connect: Connect) -> Node:
    made = Node(dsn, connect(autocommit=True))
    made.inbox("shipping", "orders")
    return made


def test_drain_delivers_and_tells_what_became_of_the_messages(dsn: str, connect: Connect) -> None:
    node = node_of(dsn, connect)
    node.send("orders", 1)
    node.send("nobody", 1)
    node.send("nobody", 1, kind="E")
    assert done("dispatcher", "deliver-all", dsn=dsn) == "3 messages taken, 1 delivered, 1 unrouted, 1 dead.\n"
    assert json_of("dispatcher", "deliver-all", dsn=dsn)["taken"] == 0


def test_status_without_a_dispatcher_fails_and_says_how_to_start_one(dsn: str) -> None:
    assert "mailroom dispatcher run" in done("dispatcher", "status", dsn=dsn, exit_code=1)
    assert done("dispatcher", "status", "--json", dsn=dsn, exit_code=1) == "null\n"


def test_run_delivers_leads_and_ends_on_sigterm(dsn: str, connect: Connect) -> None:
    node = node_of(dsn, connect)
    call = process("dispatcher", "run", dsn=dsn)
    try:
        node.send("orders", 1)
        eventually(node.delivered)
        eventually(lambda: mailroom("dispatcher", "status", dsn=dsn).exit_code == 0)
        assert json_of("dispatcher", "status", dsn=dsn)["leads"]
        assert f"pid {call.pid} leads" in done("status", dsn=dsn)
    finally:
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 0, error
    assert "Traceback" not in error
    found = json_of("dispatcher", "status", dsn=dsn, exit_code=1)
    assert (found["leads"], found["state"], found["pid"]) == (False, "stopped", call.pid)
    assert "none leads" in done("dispatcher", "status", dsn=dsn, exit_code=1)


def test_run_with_metrics_tells_what_it_counts_what_catalogs_say_and_what_it_samples(
    dsn: str, connect: Connect
) -> None:
    node = node_of(dsn, connect)
    node.send("orders", 1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def answer() -> str:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                return str(response.read().decode())
        except URLError:  # not yet
            return ""

    call = process("dispatcher", "run", "--metrics", f"127.0.0.1:{port}", dsn=dsn)
    try:
        eventually(lambda: "mailroom_inbox_oldest_seconds{" in answer())
        eventually(node.delivered)
        told = eventually(lambda: text if 'outcome="delivered"} 1' in (text := answer()) else "")
        assert 'role="dispatcher"} 1' in told
        assert "mailroom_database_up" in told
        assert "mailroom_dispatcher_awake{" in told
    finally:
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 0, error


def test_run_without_a_schema_is_told_at_once(empty_dsn: str) -> None:
    result = mailroom("dispatcher", "deliver-all", dsn=empty_dsn)
    assert "Run: mailroom migrate" in result.stderr
    call = process("dispatcher", "run", dsn=empty_dsn)
    _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 1
    assert error.splitlines()[-1].startswith("mailroom: error: There is no Mailroom schema")
