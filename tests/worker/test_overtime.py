"""Handlers that take longer than a message may: the message has failed, and nobody waits for them any longer."""

import asyncio
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inbox import AsyncWorker, Message, Worker
from inbox.cli import inbox as cli
from inbox.handling.overtime import HandlerTurn, TimedOut
from inbox.worker import worker as worker_module
from mailroom.cli.root import root
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    failing_keys,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = SHIPPING_WITH_LEDGER

TIMED_OUT = [("hung", 1, "TimedOut [MR-handler-timed-out]: timed out after 1 s")]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which a worker's handlers have their time."""
    clock = Clock()
    monkeypatch.setattr(worker_module, "HandlerTurn", partial(HandlerTurn, clock))
    return clock


def test_time_of_a_message_is_up_when_it_has_taken_that_long() -> None:
    clock = Clock()
    turn = HandlerTurn(clock)
    assert turn.left_s(5) == 5
    turn.begin()
    clock.now += 4
    assert turn.left_s(5) == 1
    with turn.ending(5) as error:
        assert error is None
    turn.end()
    turn.begin()
    clock.now += 4
    with turn.ending(5) as error:
        assert error is None
    clock.now += 1
    with turn.ending(5) as error:
        assert str(error) == "timed out after 5 s"
    for end in (turn.end, turn.begin):
        with pytest.raises(TimedOut, match="timed out after 5 s"):
            end()
    with turn.ending(5) as error:
        assert error is None, "it is ended once"


def test_handler_that_returns_in_time_cannot_be_ended_afterwards() -> None:
    clock = Clock()
    turn = HandlerTurn(clock)
    turn.begin()
    turn.end()
    clock.now += 5
    with turn.ending(5) as error:
        assert error is None


def test_handler_that_returns_while_its_failure_is_recorded_waits_for_that() -> None:
    """Else its batch would be rolled back before, and others could try the message at once."""
    clock, ended = Clock(), threading.Event()
    turn = HandlerTurn(clock)

    def handle() -> None:
        with pytest.raises(TimedOut):
            turn.end()
        ended.set()

    turn.begin()
    clock.now += 5
    thread = threading.Thread(target=handle)
    with turn.ending(5) as error:
        assert error is not None
        thread.start()
        assert not ended.wait(0.1)  # as it must not end, this costs the time
    thread.join(WITHIN_S)
    assert ended.is_set()


@pytest.mark.slow
def test_handler_that_hangs_holds_up_its_batch_until_its_time_is_up(
    node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "a", "hung", "b", "hung")
    hangs, go_on, back = threading.Event(), threading.Event(), threading.Event()
    reported: list[tuple[str, type[Exception]]] = []

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        if message.key == "hung":
            hangs.set()
            assert go_on.wait(WITHIN_S)
            back.set()

    def on_error(message: Message | None, error: Exception) -> None:
        assert message is not None
        reported.append((message.key, type(error)))

    worker = Worker(node.dsn, "shipping", handle, timeout_s=1, poll_interval_s=NEVER_S, on_error=on_error)
    with working(worker):
        assert hangs.wait(WITHIN_S)
        clock.now += 1
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"])
        assert failing_keys(node) == [("hung", 1)]
        assert node.rows("SELECT key, attempt, error FROM mailroom.attempt") == TIMED_OUT
        assert node.rows("SELECT FROM mailroom.inbox WHERE key = 'hung' FOR UPDATE NOWAIT") == [(), ()]
    assert not back.is_set(), "the worker has stopped without waiting for the handler"
    assert "assert go_on.wait(WITHIN_S)" in caplog.text, "the log says where it hangs"
    go_on.set()
    assert back.wait(WITHIN_S)
    eventually(lambda: not any("mailroom-shipping" in thread.name for thread in threading.enumerate()))
    assert sorted(ledger_keys(node)) == ["a", "b"]
    assert reported == [("hung", TimedOut)]


@pytest.mark.slow
def test_handler_that_comes_back_late_commits_nothing_and_counts_nothing(node: Node, clock: Clock) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "hung")
    hangs, go_on, back = threading.Event(), threading.Event(), threading.Event()

    def handle(message: Message, connection: Any) -> None:
        hangs.set()
        assert go_on.wait(WITHIN_S)
        back.set()

    with working(Worker(node.dsn, "shipping", handle, timeout_s=1, poll_interval_s=NEVER_S)):
        assert hangs.wait(WITHIN_S)
        clock.now += 1
        eventually(lambda: failing_keys(node))
        go_on.set()
        assert back.wait(WITHIN_S)
        deliver(node, "other")
        eventually(lambda: [key for (_, key, _) in node.delivered()] == ["hung"])
    assert node.rows("SELECT key, attempt, error FROM mailroom.attempt") == TIMED_OUT
    assert node.rows("SELECT FROM mailroom.worker") == []


@pytest.mark.slow
async def test_async_handler_that_hangs_is_cancelled(
    node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    deliver(node, "a", "hung", "b")
    hangs = asyncio.Event()
    cancelled: list[str] = []

    async def handle(message: Message, connection: Any) -> None:
        await write_ledger_async(message, connection)
        if message.key == "hung":
            hangs.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.key)
                raise

    worker = AsyncWorker(
        node.dsn, "shipping", handle, timeout_s=1, fatal=(TimeoutError,), poll_interval_s=NEVER_S
    )  # fmt: skip
    async with working_async(worker):
        await asyncio.wait_for(hangs.wait(), WITHIN_S)
        clock.now += 1
        await eventually_async(lambda: sorted(ledger_keys(node)) == ["a", "b"])
        await eventually_async(lambda: node.rows("SELECT key FROM mailroom.parked") == [("hung",)])
    assert cancelled == ["hung"]
    assert "await asyncio.Event().wait()" in caplog.text, "the log says where it hangs"
    assert node.rows("SELECT key, attempt, error FROM mailroom.attempt") == TIMED_OUT


@pytest.mark.slow
def test_handler_that_blocks_its_event_loop_holds_no_key_longer(node: Node, clock: Clock) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "hung", "a")
    hangs, go_on = threading.Event(), threading.Event()

    async def hang(message: Message, connection: Any) -> None:
        if message.key == "hung":
            hangs.set()
            assert go_on.wait(WITHIN_S)
        await write_ledger_async(message, connection)

    blocked = AsyncWorker(node.dsn, "shipping", hang, timeout_s=1, poll_interval_s=NEVER_S)
    thread = threading.Thread(target=lambda: asyncio.run(blocked.run()))
    thread.start()
    try:
        assert hangs.wait(WITHIN_S)
        clock.now += 1
        with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.05)):
            eventually(lambda: ledger_keys(node) == ["a"])
    finally:
        blocked.stop()
        go_on.set()
        thread.join(WITHIN_S)
    assert not thread.is_alive()
    assert node.rows("SELECT key, attempt, error FROM mailroom.attempt") == TIMED_OUT


@pytest.mark.slow
def test_command_gives_the_time_to_workers_that_name_none(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timed_services.py").write_text(
        "from inbox import Worker\n"
        "one, two = (Worker('', 'shipping', lambda message, conn: None, timeout_s=s) for s in (None, 7))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    served: list[Worker] = []
    monkeypatch.setattr(cli, "serve", served.extend)
    targets = ["timed_services:one", "timed_services:two"]
    result = CliRunner().invoke(root, ["worker", "run", *targets, "--timeout-s", "30", "--dsn", node.dsn])
    assert result.exit_code == 0, result.output
    assert [worker._options.timeout_s for worker in served] == [30, 7]
