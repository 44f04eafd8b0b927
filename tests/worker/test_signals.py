"""Signals stop the workers of a process, unless another handler is installed for them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inbox import AsyncWorker
from inbox.worker.signals import NUMBERS, stopping
from mailroom.cli.root import root
from mailroom.session.settings import DSN_VARIABLE
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import NEVER_S, SHIPPING_WITH_LEDGER, deliver, ledger_keys, write_ledger_async

pytestmark = [*SHIPPING_WITH_LEDGER, pytest.mark.inbox("billing")]

GATE = "SELECT pg_advisory_xact_lock(1)"
WAITS = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own() -> Iterator[None]:
    """Remove all handlers, as at the start of a process; pytest and its plugins may have installed some."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


def test_signal_stops_all_workers_that_share_it_and_is_restored() -> None:
    told: list[str] = []
    before = handlers()
    with stopping(lambda: told.append("a")):
        with stopping(lambda: told.append("b")):
            signal.raise_signal(signal.SIGTERM)
        assert told == ["a", "b"]
        signal.raise_signal(signal.SIGTERM)
    assert told == ["a", "b", "a"]
    assert handlers() == before


def test_signal_with_a_handler_is_left_unless_the_process_is_ours() -> None:
    told: list[str] = []

    def theirs(*_: object) -> None:
        told.append("theirs")

    signal.signal(signal.SIGTERM, theirs)
    with stopping(lambda: told.append("ours")):
        signal.raise_signal(signal.SIGTERM)
        assert told == ["theirs"]
        with stopping(lambda: told.append("command's"), owned=True):
            signal.raise_signal(signal.SIGTERM)
        assert told == ["theirs", "ours", "command's"]
    assert signal.getsignal(signal.SIGTERM) is theirs


async def test_signal_with_a_handler_of_the_event_loop_is_left() -> None:
    told: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told.append, "theirs")
    try:
        with stopping(lambda: told.append("ours")):
            signal.raise_signal(signal.SIGTERM)
            await eventually_async(lambda: told)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert told == ["theirs"]


def test_signal_that_got_another_handler_meanwhile_is_left() -> None:
    with stopping(lambda: None):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


async def test_async_worker_takes_no_signal_unless_asked_to(node: Node) -> None:
    before = handlers()
    worker = AsyncWorker(node.dsn, "shipping", write_ledger_async)
    task = asyncio.create_task(worker.run())
    await eventually_async(lambda: node.sessions("mailroom worker listener"))
    assert handlers() == before
    worker.stop()
    await asyncio.wait_for(task, WITHIN_S)


async def test_signal_stops_both_of_two_workers_in_one_loop(node: Node) -> None:
    before = handlers()
    workers = [AsyncWorker(node.dsn, name, write_ledger_async, handle_signals=True) for name in ("shipping", "billing")]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    await eventually_async(lambda: len(node.sessions("mailroom worker listener")) == 2)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(asyncio.gather(*tasks), WITHIN_S)
    assert handlers() == before


# -- Processes --------------------------------------------------------------------------------------------------------

HANDLER = """
import asyncio, os, sys
from inbox import AsyncWorker, Worker
from inbox.sessions import unawaited
from inbox.worker import in_flight

unawaited.WITHIN_S = in_flight.WITHIN_S = 60
DSN = os.environ["MAILROOM_DSN"]

INSERT = "INSERT INTO ledger (key, clock) VALUES (%s, %s)"

def handle(message, connection):
    connection.execute(INSERT, [message.key, message.clock])
    connection.execute("SELECT pg_advisory_xact_lock(1)")

async def handle_async(message, connection):
    await connection.execute(INSERT, [message.key, message.clock])
    await connection.execute("SELECT pg_advisory_xact_lock(1)")
"""


@pytest.fixture
def run(node: Node, connect: Connect, tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a program, and the gate at which its handlers wait: `at_the_gate`."""
    deliver(node, "a", "b")
    gate = connect(autocommit=True)
    gate.execute("SELECT pg_advisory_lock(1)")
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *command: str) -> tuple[subprocess.Popen[str], Any]:
        (tmp_path / "program.py").write_text(HANDLER + program)
        process = subprocess.Popen(
            [sys.executable, *(command or ["program.py"])], cwd=tmp_path, env=os.environ | {DSN_VARIABLE: node.dsn},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process, gate

    yield start
    for process in started:
        process.kill()
        process.communicate()


def at_the_gate(node: Node, process: subprocess.Popen[str], handlers: int = 1) -> None:
    eventually(lambda: process.poll() is not None or len(node.rows(WAITS)) == handlers)
    assert process.poll() is None


API = """
worker = AsyncWorker(DSN, "shipping", handle_async, batch_s=None)

async def app(scope, receive, send):
    assert scope["type"] == "lifespan"
    await receive()
    task = asyncio.create_task(worker.run())
    await send({"type": "lifespan.startup.complete"})
    await receive()
    print("stopping", flush=True)
    END
    await send({"type": "lifespan.shutdown.complete"})

import uvicorn
uvicorn.run(app, port=0, lifespan="on")
"""
ENDS = {
    "stopped": "worker.stop(); await task",
    "cancelled": "task.cancel(); await asyncio.wait([task]); assert task.cancelled()",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_sigterm_ends_an_api_and_the_worker_in_its_lifespan_which_finishes_its_batch(
    node: Node, run: Any, end: str
) -> None:
    process, gate = run(API.replace("END", end))
    while "Uvicorn running" not in (line := process.stderr.readline()):
        assert line, "it ended"
    at_the_gate(node, process)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    gate.execute("SELECT pg_advisory_unlock(1)")
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == -signal.SIGTERM, error  # uvicorn raises it again once it has shut down
    assert ledger_keys(node) == ["a", "b"], error
    assert node.delivered() == node.rows("SELECT FROM mailroom.worker") == []


@pytest.mark.slow
def test_second_ctrl_c_ends_the_process_at_once(node: Node, run: Any) -> None:
    process, _ = run("""
class Telling(Worker):
    def stop(self):
        super().stop()
        print("stopping", flush=True)

Telling(DSN, "shipping", handle).run()
""")
    at_the_gate(node, process)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(WITHIN_S) == -signal.SIGINT


@pytest.mark.slow
def test_ctrl_c_finishes_the_batch_also_where_it_is_left_to_python(node: Node, run: Any) -> None:
    """asyncio handles it then and cancels the task; the handler continues in its thread."""
    process, gate = run('Worker(DSN, "shipping", handle, batch_s=None, handle_signals=False).run()')
    at_the_gate(node, process)
    process.send_signal(signal.SIGINT)
    gate.execute("SELECT pg_advisory_unlock(1)")
    _, error = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, error.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert ledger_keys(node) == ["a", "b"], error
    assert node.delivered() == node.rows("SELECT FROM mailroom.worker") == []


@pytest.mark.slow
def test_signal_is_left_to_its_default_on_request(node: Node, run: Any) -> None:
    process, _ = run('Worker(DSN, "shipping", handle, batch_s=None, handle_signals=False).run()')
    at_the_gate(node, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == -signal.SIGTERM
    assert ledger_keys(node) == []


# -- Several in one process -------------------------------------------------------------------------------------------

SEVERAL = f"""
sync = Worker(DSN, "shipping", handle, batch_s=None, poll_interval_s={NEVER_S})
not_sync = AsyncWorker(DSN, "billing", handle_async, batch_s=None, poll_interval_s={NEVER_S})
lost = AsyncWorker(DSN, "nowhere", handle_async)

async def exits_async(message, connection):
    sys.exit(7)

exits = Worker(DSN, "billing", lambda message, connection: sys.exit(7))
exits_too = AsyncWorker(DSN, "billing", exits_async)
"""
COMMAND = ("-m", "mailroom", "worker", "run")


@pytest.mark.slow
def test_command_runs_several_workers_logs_what_they_reap_and_a_signal_stops_them_all(node: Node, run: Any) -> None:
    node.send("billing", key="c")
    node.deliver_all()
    process, gate = run(SEVERAL, *COMMAND, "program:sync", "program:not_sync")
    at_the_gate(node, process, 2)
    process.send_signal(signal.SIGTERM)
    gate.execute("SELECT pg_advisory_unlock(1)")
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, error
    assert sorted(ledger_keys(node)) == ["a", "b", "c"]
    assert node.delivered() == node.rows("SELECT FROM mailroom.worker") == []
    first, *lines = error.splitlines()
    assert "SIGTERM or Ctrl-C" in first
    assert sorted(line.partition("mailroom.worker: ")[2].partition(" of ")[0] for line in lines) == [
        "billing: running in schema mailroom", "billing: stopped",
        "shipping: running in schema mailroom", "shipping: stopped",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("other", "code", "last"), [("lost", 1, "mailroom: error: "), ("exits", 7, ""), ("exits_too", 7, "")]
)
def test_worker_that_ends_ends_the_others_of_its_process_which_finish_their_batches(
    node: Node, run: Any, other: str, code: int, last: str
) -> None:
    process, gate = run(SEVERAL, *COMMAND, "program:sync", f"program:{other}")
    if other != "lost":
        at_the_gate(node, process)
        node.send("billing", key="c")
        node.deliver_all()
    gate.execute("SELECT pg_advisory_unlock(1)")
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == code, error
    assert error.splitlines()[-1].startswith(last)
    if other != "lost":
        assert ledger_keys(node) == ["a", "b"], error


def test_command_refuses_one_worker_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = "postgresql://me@127.0.0.1:1/shop"
    (tmp_path / "twice.py").write_text(f"from inbox import Worker\n\nsync = Worker({dsn!r}, 'shipping', print)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    result = CliRunner().invoke(root, ["worker", "run", "twice:sync", "twice:sync", "--dsn", dsn])
    assert result.exit_code == 2
    assert "given twice" in result.output
