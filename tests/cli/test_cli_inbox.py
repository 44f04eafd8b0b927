"""`mailroom inbox`, `mailroom worker`: what is printed is what is reaped, and nothing is lost on the way."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.command import done, error_of, json_of, mailroom, process, untold
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually

REAP = ("inbox", "reap", "shipping")


pytestmark = pytest.mark.inbox("shipping", "orders")


def deliver(node: Node, *values: object, key: str = "k") -> None:
    for value in values:
        node.send("orders", value, key=key)
    node.deliver_all()


def test_create_may_be_repeated_and_adds_subscriptions(node: Node) -> None:
    done("inbox", "create", "billing", "--subscribe", "paid", "--backoff-s", "5", dsn=node.dsn)
    done("inbox", "create", "billing", "--subscribe", "refunded", dsn=node.dsn)
    [billing, shipping] = json_of("inbox", "list", dsn=node.dsn)
    assert (billing["name"], billing["topics"], billing["backoff_s"]) == ("billing", ["paid", "refunded"], 5)
    assert (shipping["name"], shipping["topics"]) == ("shipping", ["orders"])


def test_create_takes_several_names(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inbox.cli.inbox.AT_ONCE", 2)
    done("inbox", "create", "ledger", "--order", "total", dsn=node.dsn)
    said = done("inbox", "create", "a", "b", "a", "ledger", "--subscribe", "paid", dsn=node.dsn).splitlines()
    assert said[:3] == [f"Inbox {name} exists, subscribed to paid." for name in ("a", "b", "ledger")]
    assert [line.partition(" A message that fails")[0] for line in said[3:]] == [
        "a, b:", "ledger: Its order is total: one queue, and a message that fails holds up all others."
    ]  # fmt: skip
    found = json_of("inbox", "list", dsn=node.dsn)
    assert {each["name"]: each["topics"] for each in found} == {
        "a": ["paid"], "b": ["paid"], "ledger": ["paid"], "shipping": ["orders"]
    }  # fmt: skip
    done("inbox", "create", "c", "d", dsn=node.dsn)
    refused = mailroom("inbox", "create", "e", "f", "registry_pkey", "g", dsn=node.dsn)
    assert "Inbox 'registry_pkey' cannot be created" in error_of(refused)
    names = [each["name"] for each in json_of("inbox", "list", dsn=node.dsn)]
    assert names == ["a", "b", "c", "d", "e", "f", "ledger", "shipping"]  # what was committed before stays


@pytest.mark.slow
def test_create_migrates_first_if_it_is_told_to(empty_dsn: str) -> None:
    create = ("inbox", "create", "shipping", "--subscribe", "order.paid")
    assert "mailroom migrate" in error_of(mailroom(*create, dsn=empty_dsn))
    said = done(*create, "--migrate", dsn=empty_dsn).splitlines()
    assert said[0].startswith("Schema mailroom went from revision base to ")
    assert said[1] == "Inbox shipping exists, subscribed to order.paid."
    assert (
        done(*create, "--migrate", dsn=empty_dsn).splitlines() == said[1:]
    )  # what changed nothing is not worth a line
    assert json_of(*create, "--migrate", dsn=empty_dsn)["inbox"] == "shipping"


def test_subscriptions_begin_and_end(node: Node) -> None:
    subscribe, unsubscribe = ("inbox", "subscribe", "shipping"), ("inbox", "unsubscribe", "shipping")
    said = mailroom(*subscribe, "order.*", "orders", dsn=node.dsn)
    assert (said.exit_code, said.stdout) == (0, "Inbox shipping has subscribed to order.*.\n")
    assert said.stderr == "It had subscribed before to orders.\n"
    assert json_of(*subscribe, "#", "order.*", dsn=node.dsn)["subscribed"] == ["#"]
    [shipping] = json_of("inbox", "list", dsn=node.dsn)
    assert shipping["topics"] == ["#", "order.*", "orders"]
    said = mailroom(*unsubscribe, "order.*", "order.#", dsn=node.dsn)
    assert (said.exit_code, said.stdout) == (0, "Inbox shipping no longer subscribes to order.*.\n")
    assert said.stderr == "It does not subscribe to order.#; mailroom inbox list shows to what.\n"
    assert json_of(*unsubscribe, "#", "order.*", dsn=node.dsn)["unsubscribed"] == ["#"]
    [shipping] = json_of("inbox", "list", dsn=node.dsn)
    assert shipping["topics"] == ["orders"]


def test_subscriptions_that_cannot_be_are_refused(node: Node) -> None:
    pattern = "Topic pattern 'order*' is not valid: use a topic, in which * may stand for a whole word"
    for command in ("subscribe", "unsubscribe"):
        calls: list[tuple[tuple[str, ...], int, str]] = [
            (("inbox", command, "shipping", "order*"), 2, pattern),
            (("inbox", command, "nowhere", "order.*"), 1, "mailroom inbox create nowhere"),
            (("inbox", command, "shipping"), 2, "TOPIC"),
        ]
        assert untold(calls, node.dsn) == []


def test_list_for_people_names_inboxes_and_topics(node: Node) -> None:
    text = done("inbox", "list", dsn=node.dsn)
    assert "shipping" in text
    assert "orders" in text


def test_peek_leaves_the_messages(node: Node) -> None:
    deliver(node, 1, 2)
    for _ in range(2):
        lines = done("inbox", "peek", "shipping", "--key", "k", "--limit", "1", "--json", dsn=node.dsn).splitlines()
        assert [json.loads(line)["value"] for line in lines] == [1]
    assert done("inbox", "peek", "shipping", "--key", "other", dsn=node.dsn) == ""


def test_reap_takes_the_oldest_of_a_key(node: Node) -> None:
    deliver(node, 1, 2, 3)
    lines = done(*REAP, "--key", "k", "--limit", "2", "--json", dsn=node.dsn).splitlines()
    assert [json.loads(line)["value"] for line in lines] == [1, 2]
    assert node.delivered("clock") == [(3,)]


def test_reap_any_takes_no_more_than_the_limit(node: Node) -> None:
    for key in ("a", "b", "c"):
        deliver(node, 1, 2, key=key)
    assert len(done(*REAP, "--any", "--limit", "4", "--json", dsn=node.dsn).splitlines()) == 4
    assert len(node.delivered()) == 2


def test_nothing_to_reap_is_said_beside_the_output(node: Node) -> None:
    result = mailroom(*REAP, "--any", dsn=node.dsn)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "Nothing to reap.\n")


def test_json_carries_what_it_has_no_form_for_as_text(node: Node) -> None:
    value = {
        "moment": datetime(2024, 2, 29, 12, tzinfo=UTC),
        "day": date(2024, 2, 29),
        "amount": Decimal("1.50"),
        "id": UUID(int=7),
        "bytes": b"\x00\xff",
        "far": float("inf"),
        "large": 2**63,
        "nested": [{b"\x01": True}],
    }
    deliver(node, value)
    [message] = map(json.loads, done(*REAP, "--any", "--json", dsn=node.dsn).splitlines())
    assert message["value"] == {
        "moment": "2024-02-29T12:00:00+00:00",
        "day": "2024-02-29",
        "amount": "1.50",
        "id": str(UUID(int=7)),
        "bytes": "AP8=",
        "far": "inf",
        "large": 2**63,
        "nested": [{"AQ==": True}],
    }


def test_undecodable_value_is_printed_raw_with_a_note_and_the_others_as_ever(node: Node) -> None:
    node.connection.execute("INSERT INTO mailroom.outbox (topic, key, value) VALUES ('orders', 'k', '\\xff')")
    deliver(node, "well")
    first, second = map(json.loads, done(*REAP, "--key", "k", "--json", dsn=node.dsn).splitlines())
    assert (first["raw"], "value" in first) == ("/w==", False)
    assert "cannot be decoded" in first["note"]
    assert second["value"] == "well"


def test_json_that_python_does_not_read_is_printed_raw(node: Node) -> None:
    for number in ("1" * 5_000, "[" * 2_000 + "]" * 2_000):
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, value_json) VALUES ('orders', %s::text::jsonb)", [number]
        )
    node.deliver_all()
    messages = [json.loads(line) for line in done(*REAP, "--any", "--json", dsn=node.dsn).splitlines()]
    assert ["raw" in message for message in messages] == [True, True]
    assert node.delivered() == []


def test_for_people_the_value_is_printed_whole_and_steers_no_terminal(node: Node) -> None:
    value = "\x9b31m" + "x" * 500 + "[red]"
    deliver(node, value, key="k\x1b[0m")
    text = done(*REAP, "--any", dsn=node.dsn)
    assert "\\x9b31m" + "x" * 500 + "[red]" in text
    assert "k\\x1b[0m" in text


@pytest.mark.slow
def test_reap_that_nobody_reads_takes_nothing(node: Node) -> None:
    deliver(node, "x" * 100_000)
    reader, writer = os.pipe()
    os.close(reader)
    call = process(*REAP, "--any", dsn=node.dsn, stdout=writer)
    os.close(writer)
    _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 1
    [told] = error.splitlines()
    assert told.startswith("mailroom: error: Nothing was reaped: the output could not be written (Broken pipe).")
    assert len(node.delivered()) == 1


@pytest.mark.slow
def test_reap_onto_a_full_disk_takes_nothing(node: Node) -> None:
    deliver(node, 1)
    with Path("/dev/full").open("w") as full:
        call = process(*REAP, "--any", dsn=node.dsn, stdout=full)
        _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 1
    [line] = error.splitlines()
    assert "Nothing was reaped" in line
    assert len(node.delivered()) == 1


@pytest.mark.slow
def test_reap_without_stdout_takes_nothing(node: Node) -> None:
    deliver(node, 1)
    call = process(*REAP, "--any", dsn=node.dsn, preexec_fn=lambda: os.close(1))
    _, error = call.communicate(timeout=WITHIN_S)
    assert call.returncode == 1
    [line] = error.splitlines()
    assert "Nothing was reaped" in line
    assert len(node.delivered()) == 1


@pytest.mark.slow
def test_reap_commits_after_it_has_printed(node: Node) -> None:
    deliver(node, "x" * 10_000_000)
    call = process(*REAP, "--any", dsn=node.dsn, stdout=subprocess.PIPE)
    assert call.stdout is not None
    assert call.stdout.read(1)
    # The pipe is full and nobody reads on, so the command stands before its commit.
    assert len(node.delivered()) == 1
    call.communicate(timeout=WITHIN_S)
    assert node.delivered() == []


LOADED = [
    ("of_no_worker", 2, "MODULE:WORKER"),
    ("no_such_module:worker", 2, "no module 'no_such_module'"),
    ("of_no_worker.inner:worker", 2, "no module"),
    ("of_no_worker:no_worker", 2, "no 'no_worker'"),
    ("of_no_worker:handler", 2, "function"),
    ("of_no_worker_broken:worker", 1, "ZeroDivisionError"),
    ("of_no_worker_lacking:worker", 1, "no_such_dependency"),
]


def test_worker_that_cannot_be_loaded_is_told(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "of_no_worker.py").write_text("def handler(message, conn): ...\n")
    (tmp_path / "of_no_worker_broken.py").write_text("1 / 0\n")
    (tmp_path / "of_no_worker_lacking.py").write_text("import no_such_dependency\n")
    assert untold([(("worker", "run", target), code, fault) for target, code, fault in LOADED], node.dsn) == []


def test_worker_refuses_a_schema_it_would_not_use(node: Node) -> None:
    assert "--schema" in error_of(mailroom("worker", "run", "service:worker", "--schema", "shop", dsn=node.dsn))


SERVICE = """
from inbox import {kind}
from mailroom.session import settings

{async_}def handler(message, conn):
    {await_}conn.execute("INSERT INTO public.handled VALUES (%s)", [message.value])

class services:
    worker = {kind}(settings.dsn(), "shipping", handler)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "async_", "await_"), [("Worker", "", ""), ("AsyncWorker", "async ", "await ")])
def test_worker_runs_on_the_database_given_until_it_is_told_to_stop(
    kind: str, async_: str, await_: str, node: Node, tmp_path: Path
) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(kind=kind, async_=async_, await_=await_))
    node.connection.execute("CREATE TABLE public.handled (value text)")
    deliver(node, "one")
    arguments = ("worker", "run", "service:services.worker", "--dsn", node.dsn)
    call = process(*arguments, dsn="host=nowhere.invalid", cwd=tmp_path)
    try:
        eventually(lambda: node.rows("TABLE public.handled") == [("one",)])
    finally:
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
    assert (call.returncode, "Traceback" in error) == (0, False)


def test_limits_are_set_listed_and_taken_back(node: Node) -> None:
    def settings() -> list[object]:
        [listed, _] = json_of("inbox", "list", dsn=node.dsn)
        return [listed[each] for each in ("rate", "burst", "concurrency", "breaker", "breaker_by")]

    def change(*options: str) -> str:
        return done("inbox", "set", "billing", *options, dsn=node.dsn)

    done("inbox", "create", "billing", "--rate", "10", "--burst", "20", "--breaker", "50", dsn=node.dsn)
    assert settings() == [10, 20, None, 50, None]
    listed = done("inbox", "list", dsn=node.dsn)
    assert [each in listed for each in ("rate 10", "burst 20", "breaker 50")] == [True] * 3
    assert change("--concurrency", "4") == "Inbox billing: concurrency none -> 4.\n"
    assert change("--backoff-s", "5", "--rate", "0") == (
        "Inbox billing: backoff_s 1 -> 5, rate 10 -> none, burst 20 -> none.\n"
    )
    assert settings() == [None, None, 4, 50, None]
    assert change("--breaker", "50", "--breaker-by", "/") == "Inbox billing: breaker_by none -> /.\n"
    assert change("--breaker", "50") == "Inbox billing: nothing to change.\n"
    assert change("--breaker-by", "") == "Inbox billing: breaker_by / -> none.\n"
    assert settings() == [None, None, 4, 50, None]
    assert json_of("inbox", "set", "billing", "--expire-s", "60", dsn=node.dsn)["change"] == "expire_s none -> 60"
    assert change("--expire-s", "0") == "Inbox billing: expire_s 60 -> none.\n"
    for of, option in (("rate", ("--burst", "5")), ("breaker", ("--breaker-by", "/"))):
        assert f"goes with a {of}: give both" in error_of(mailroom("inbox", "set", "billing", *option, dsn=node.dsn))


def test_slip_of_a_name_changes_nothing(node: Node) -> None:
    node.inbox("shipping")
    refused = mailroom("inbox", "set", "shipping", "shiping", "--rate", "10", dsn=node.dsn)
    assert "There is no inbox 'shiping'" in error_of(refused)
    refused = mailroom("inbox", "create", "shipping", "--rate", "10", dsn=node.dsn)
    assert "rate none -> 10. To change them: mailroom inbox set shipping" in error_of(refused)
    assert "Give a setting to change" in error_of(mailroom("inbox", "set", "shipping", dsn=node.dsn))
    assert [each["rate"] for each in json_of("inbox", "list", dsn=node.dsn)] == [None]
