"""What people see: tables that fit the screen, and that something goes on while a command is silent."""

import os
import pty
import re
import subprocess
import threading
from contextlib import suppress

import pytest

from mailroom.cli.output import facts, table
from tests.support.command import done, process
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually

pytestmark = pytest.mark.sample(2)


# -- Widths -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_status_is_whole_at_any_width(node: Node, columns: int) -> None:
    node.inbox("shipping", "orders")
    node.inbox("audit_log", "orders", "cancelled")
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, key, value_json) "
        "SELECT 'orders', 'order-' || n % 3, 'null' FROM generate_series(1, 1500) AS n"
    )
    text = done("status", dsn=node.dsn, COLUMNS=str(columns))
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    words = text.split()
    for word in ("audit_log", "shipping", "1,500", "backlog", "oldest"):
        assert word in words, text
    # A heading above all rows where there is room, else a block for each.
    assert words.count("lag") == (1 if columns >= 60 else 2)
    assert "expired" not in words


def test_status_shows_what_failed_where_anything_did(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.inbox("audit_log", "orders")
    node.connection.execute("UPDATE mailroom.inbox_registry SET expired = 12 WHERE name = 'audit_log'")
    lines = done("status", dsn=node.dsn, COLUMNS="200").splitlines()
    [headings] = [line for line in lines if line.split()[:1] == ["inbox"]]
    columns = re.split(" {2,}", headings.strip())
    assert len(set(columns)) == len(columns)
    assert columns[-1] == "expired"
    assert "parked" not in headings
    assert [line.split()[0] + line.split()[-1] for line in lines[-2:]] == ["audit_log12", "shipping0"]


def test_what_nobody_looks_at_is_not_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    key, reason = "k" * 1_024, "because " * 100
    table(("key", "reason"), [(key, reason)])
    assert any(line.startswith(f"{key}  {reason.strip()}") for line in capsys.readouterr().out.splitlines())


def test_words_of_a_usual_length_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    key, error = "3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11", "x" * 300
    table(("key", "messages", "reason"), [(key, 12_345, "no such street"), ("short", 1, error)], numbers=("messages",))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert key in " ".join(lines)
    assert "12,345" in " ".join(lines)
    assert "".join(lines).count("x") == 300
    assert lines[0].split() == ["key", key]


def test_table_without_rows_is_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    table(("key", "reason"), [])
    assert capsys.readouterr().out.split()[:2] == ["key", "reason"]


def test_facts_are_broken_under_themselves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    facts([("Node", "one " * 15), ("Dispatcher", "")])
    broken = ["Node        " + "one " * 7, " " * 12 + "one " * 7, " " * 12 + "one", "Dispatcher"]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == list(map(str.rstrip, broken))


# -- Something goes on ------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal on which a command's stderr is shown."""

    def __init__(self) -> None:
        self._screen, self.end = pty.openpty()
        self.shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # nobody writes any more
            while part := os.read(self._screen, 1_024):
                self.shown += part

    def close(self) -> None:
        os.close(self.end)
        self._reader.join()
        os.close(self._screen)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dead-letter", "discard", "--all"], b"discarding dead letters"),
        (["dead-letter", "requeue", "--all"], b"requeueing dead letters"),
        (["parked", "discard", "shipping", "--all"], b"discarding messages of parked keys"),
        (["parked", "replay", "shipping", "--all"], b"replaying parked keys"),
    ],
)
def test_a_long_statement_is_seen_to_go_on(node: Node, connect: Connect, arguments: list[str], told: bytes) -> None:
    node.inbox("shipping", "orders")
    node.send("nobody")
    node.deliver_all()
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, last_error, parked_at) "
        "VALUES ('shipping', 'k', 1, 2, 'infinity', 'no such street', now())"
    )
    holder, terminal = connect(), Terminal()
    holder.execute("SELECT FROM mailroom.dead_letter, mailroom.key_state FOR UPDATE")
    call = process(*arguments, dsn=node.dsn, stdout=subprocess.PIPE, stderr=terminal.end)
    try:
        eventually(lambda: told in terminal.shown)
        holder.rollback()
        output, _ = call.communicate(timeout=WITHIN_S)
    finally:
        call.kill()
        terminal.close()
    assert call.returncode == 0, terminal.shown
    assert output.startswith("1 dead letter" if "dead-letter" in arguments else "0 messages of 1 parked key")


@pytest.mark.slow
def test_a_program_that_reads_json_sees_no_progress(node: Node) -> None:
    terminal = Terminal()
    call = process("migrate", "--json", dsn=node.dsn, stdout=subprocess.PIPE, stderr=terminal.end)
    try:
        output, _ = call.communicate(timeout=WITHIN_S)
    finally:
        call.kill()
        terminal.close()
    assert (call.returncode, terminal.shown) == (0, b"")
    assert output.startswith("{")


def test_where_nobody_looks_nothing_is_shown(node: Node) -> None:
    call = process("dead-letter", "discard", "--all", dsn=node.dsn, stdout=subprocess.PIPE)
    assert call.communicate(timeout=WITHIN_S) == ("0 dead letters discarded.\n", "")
