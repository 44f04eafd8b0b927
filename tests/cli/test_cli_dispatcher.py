"""`mailroom dispatcher`."""

import json
import signal
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.command import done, json_of, mailroom, process
from tests.support.node import Node
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S, eventually

shipping = pytest.mark.inbox("shipping", "orders")


@shipping
def test_drain_delivers_and_tells_what_became_of_the_messages(node: Node) -> None:
    node.send("orders", 1)
    node.send("nobody", 1)
    node.send("nobody", 1, kind="E")
    assert done("dispatcher", "deliver-all", dsn=node.dsn) == "3 messages taken, 1 delivered, 1 unrouted, 1 dead.\n"
    assert json_of("dispatcher", "deliver-all", dsn=node.dsn)["taken"] == 0


def test_status_without_a_dispatcher_fails_and_says_how_to_start_one(dsn: str) -> None:
    assert "mailroom dispatcher run" in done("dispatcher", "status", dsn=dsn, exit_code=1)
    assert done("dispatcher", "status", "--json", dsn=dsn, exit_code=1) == "null\n"


@pytest.mark.slow
@shipping
def test_run_delivers_leads_and_ends_on_sigterm(node: Node) -> None:
    dsn = node.dsn
    call = process("dispatcher", "run", dsn=dsn)
    try:
        node.send("orders", 1)
        eventually(node.delivered)
        # Its lease ends after three seconds in which it does not run, until it takes it again.
        eventually(lambda: json.loads(mailroom("dispatcher", "status", "--json", dsn=dsn).stdout)["leads"])
        eventually(lambda: f"pid {call.pid} leads" in done("status", dsn=dsn))
        eventually(lambda: mailroom("dispatcher", "status", dsn=dsn).exit_code == 0)
    finally:
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 0, error
    assert "Traceback" not in error
    found = json_of("dispatcher", "status", dsn=dsn, exit_code=1)
    assert (found["leads"], found["state"], found["pid"]) == (False, "stopped", call.pid)
    assert "none leads" in done("dispatcher", "status", dsn=dsn, exit_code=1)


@pytest.mark.slow
@shipping
def test_run_with_metrics_tells_what_it_counts_what_catalogs_say_and_what_it_samples(node: Node) -> None:
    node.send("orders", 1)
    port = free_port()
    wanted = {
        "mailroom_inbox_oldest_seconds{", 'outcome="delivered"} 1', 'role="dispatcher"} 1', "mailroom_database_up",
        "mailroom_dispatcher_awake{",
    }  # fmt: skip

    def answer() -> str:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                return str(response.read().decode())
        except URLError:  # not yet
            return ""

    def lacking() -> set[str]:
        told = answer()
        return {each for each in wanted if each not in told}

    call = process("dispatcher", "run", "--metrics", f"127.0.0.1:{port}", dsn=node.dsn)
    try:
        eventually(lambda: not lacking())
        assert node.delivered()
    finally:
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 0, error


@pytest.mark.slow
def test_run_without_a_schema_is_told_at_once(empty_dsn: str) -> None:
    result = mailroom("dispatcher", "deliver-all", dsn=empty_dsn)
    assert "Run: mailroom migrate" in result.stderr
    call = process("dispatcher", "run", dsn=empty_dsn)
    _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 1
    assert error.splitlines()[-1].startswith("mailroom: error: There is no Mailroom schema")
