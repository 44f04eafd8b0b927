"""`mailroom executor`."""

import getpass
import json
import platform
import signal
from typing import Any

import pytest

from outbox import Store
from tests.support.command import done, json_of, mailroom, process, untold
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually

ME = f"{getpass.getuser()}@{platform.node()}"
STATS = ("executor", "target", "add", "stats", "public.counters", "--key", "name", "--number", "hits")


pytestmark = pytest.mark.node_sql(
    "CREATE TABLE counters (name text PRIMARY KEY, hits bigint, body text)",
    "CREATE FUNCTION note(given jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT given'",
)


def increment(node: Node, key: str, target: str = "store", **told: Any) -> None:
    with node.connection.transaction():
        Store(target=target).increment(node.connection, key, **told)


def audited(node: Node) -> list[Any]:
    return node.rows("SELECT actor, action, reason FROM mailroom.audit ORDER BY id")


# -- Executing --------------------------------------------------------------------------------------------------------


def test_drain_executes_and_tells_what_became_of_the_executables(node: Node) -> None:
    increment(node, "a", notify="told")
    increment(node, "a")
    increment(node, "a", target="nowhere")
    assert done("executor", "execute-all", dsn=node.dsn) == "3 executables taken, 1 dead, 1 replied.\n"
    assert json_of("executor", "execute-all", dsn=node.dsn) == {"taken": 0, "dead": 0, "replied": 0}
    assert node.value("SELECT number FROM mailroom.store") == 2


def test_status_without_an_executor_says_how_to_start_one(dsn: str) -> None:
    assert "mailroom dispatcher run" in done("executor", "status", dsn=dsn, exit_code=1)
    assert done("executor", "status", "--json", dsn=dsn, exit_code=1) == "null\n"


@pytest.mark.slow
def test_run_executes_leads_and_delivers_nothing(node: Node) -> None:
    node.inbox("shipping")
    call = process("executor", "run", dsn=node.dsn)
    try:
        node.send("shipping")
        increment(node, "a")
        eventually(lambda: node.rows("SELECT number FROM mailroom.store"))
        # Its lease ends after three seconds in which it does not run, until it takes it again.
        eventually(lambda: json.loads(mailroom("executor", "status", "--json", dsn=node.dsn).stdout)["leads"])
        leads = f"Executor     {platform.node()} pid {call.pid} leads"
        eventually(lambda: leads in done("status", dsn=node.dsn))
        eventually(lambda: mailroom("executor", "status", dsn=node.dsn).exit_code == 0)
        assert json_of("dispatcher", "status", dsn=node.dsn, exit_code=1) is None
        assert node.delivered() == []
    finally:
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 0, error
    assert "Traceback" not in error
    found = json_of("executor", "status", dsn=node.dsn, exit_code=1)
    assert (found["leads"], found["state"], found["pid"]) == (False, "stopped", call.pid)


# -- Targets ----------------------------------------------------------------------------------------------------------


def test_target_is_added_listed_written_and_removed(node: Node) -> None:
    assert "executor target add" in done("executor", "target", "list", dsn=node.dsn)
    assert done(*STATS, "--why", "busy", dsn=node.dsn) == "Target stats is registered.\n"
    [found] = json_of("executor", "target", "list", dsn=node.dsn)
    assert found.pop("created_at")
    assert found == {
        "name": "stats", "table": "public.counters", "key": "name", "value": None, "number": "hits", "fault": None,
    }  # fmt: skip
    assert "public.counters" in done("executor", "target", "list", dsn=node.dsn)
    assert mailroom("executor", "target", "list", dsn=node.dsn).stderr == ""
    node.connection.execute("ALTER TABLE counters RENAME TO moved")
    told = mailroom("executor", "target", "list", dsn=node.dsn).stderr
    assert told.startswith("stats could not be registered as it is now. There is no table 'public.counters'.")
    node.connection.execute("ALTER TABLE moved RENAME TO counters")
    increment(node, "a", target="stats")
    done("executor", "execute-all", dsn=node.dsn)
    assert node.rows("SELECT name, hits FROM counters") == [("a", 1)]
    told = done("executor", "target", "remove", "stats", "--actor", "ada", dsn=node.dsn)
    assert told == "Target stats: public.counters, key name, number hits is removed.\n"
    assert audited(node) == [(ME, "executor target add", "busy"), ("ada", "executor target remove", None)]


def test_target_that_is_replaced_is_told(node: Node) -> None:
    done(*STATS, dsn=node.dsn)
    text = done(*STATS, "--value", "body", dsn=node.dsn)
    assert text == "Target stats is registered; before: stats: public.counters, key name, number hits.\n"
    told = json_of(*STATS, dsn=node.dsn)
    assert (told["name"], told["before"]["value"], told["dry_run"]) == ("stats", "body", False)


def test_dry_runs_change_nothing(node: Node) -> None:
    assert done(*STATS, "--dry-run", dsn=node.dsn) == "Target stats would be registered.\n"
    assert json_of("executor", "target", "list", dsn=node.dsn) == []
    done(*STATS, dsn=node.dsn)
    assert "would be removed" in done("executor", "target", "remove", "stats", "--dry-run", dsn=node.dsn)
    assert len(json_of("executor", "target", "list", dsn=node.dsn)) == 1


BAD = [
    ((*STATS[:3], "store", *STATS[4:]), 2, "choose another name"),
    ((*STATS[:4], "public.nowhere", *STATS[5:]), 2, "no table 'public.nowhere'"),
    ((*STATS[:4], "counters", *STATS[5:]), 2, "give schema.table"),
    ((*STATS[:5], "--key", "name"), 2, "Give a column for values"),
    ((*STATS[:5], "--number", "hits"), 2, "--key"),
    (("executor", "target", "remove", "stats"), 1, "no such target stats. See: mailroom executor target list"),
    (("executor", "function", "add", "note", "public.nowhere"), 2, "no function 'public.nowhere'"),
    (("executor", "function", "add", "note", "public.note", "--timeout-s", "301"), 2, "at most 300"),
    (("executor", "function", "remove", "note"), 1, "no such function note. See: mailroom executor function list"),
]


def test_bad_input_is_told(node: Node) -> None:
    assert untold(BAD, node.dsn) == []
    assert audited(node) == []


# -- Functions --------------------------------------------------------------------------------------------------------


def test_function_is_added_listed_and_removed(node: Node) -> None:
    assert "executor function add" in done("executor", "function", "list", dsn=node.dsn)
    add = ("executor", "function", "add", "note", "public.note")
    assert done(*add, dsn=node.dsn) == "Function note is registered.\n"
    assert done(*add, "--timeout-s", "2.5", dsn=node.dsn).endswith("; before: note: public.note, 10 s.\n")
    [found] = json_of("executor", "function", "list", dsn=node.dsn)
    assert (found["name"], found["function"], found["timeout_s"]) == ("note", "public.note", 2.5)
    assert "2.5 s" in done("executor", "function", "list", dsn=node.dsn)
    told = done("executor", "function", "remove", "note", "--why", "gone", dsn=node.dsn)
    assert told == "Function note: public.note, 2.5 s is removed.\n"
    assert json_of("executor", "function", "list", dsn=node.dsn) == []
    assert audited(node)[-1] == (ME, "executor function remove", "gone")
