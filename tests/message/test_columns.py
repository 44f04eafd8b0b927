"""A column that is added to messages goes along on every way, since all lists of columns are made of one table."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mailroom.links.handshake.wire import VERSION, WIRE_COLUMNS
from mailroom.message.columns import CHAR, DELIVERED, EXECUTABLE_ROW, MESSAGE, MESSAGE_ROW, MOVING, PLAIN
from tests.support.databases import Connect

ROOT = Path(__file__).parents[2]
# What a maintainer writes for a column that writers set and consumers see, beside the argument of `Outbox.send` and the
# migration.
EDITS = {
    "mailroom/message/columns.py": [
        ('    Column("after_clock", "bigint"),\n', '    Column("note", "text"),\n'),
    ],
    "mailroom/message/outgoing.py": [
        ("    after_clock: int | None = None\n", "    note: str | None = None\n"),
        ("expires_at: datetime | None = None, after_clock: int | None = None,", " note: str | None = None,"),
        ("        _set_after_clock(self, after_clock)\n", "        _set_note(self, note)\n"),
        ("_set_expires_at, _set_after_clock,", " _set_note,"),
        ("        None if message.after_clock is None else clock(message.after_clock),\n", "        message.note,\n"),
    ],
    "mailroom/message/message.py": [
        ('"_sent_at", "_expires_at", "_delivered_at",', ' "note",'),
        ("expires_at: datetime | None, delivered_at: datetime,", " note: str | None,"),
        ("        self._delivered_at = delivered_at\n", "        self.note = note\n"),
    ],
}
WAYS = ("one", "copy", "arrays", "staged", "due", "parked", "skipped", "fanned", "linked")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the source whose messages have a column more."""
    for name in ("mailroom", "inbox", "outbox", "dispatcher", "spark_jobs", "alembic"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    for file, edits in EDITS.items():
        text = (tmp_path / file).read_text()
        for behind, added in edits:
            before, found, after = text.partition(behind)
            assert found, f"{file} has no longer: {behind}"
            text = before + behind + added + after
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_column_that_is_added_is_dropped_on_no_way(copy: Path, dsn: str, target_dsn: str) -> None:
    command = [sys.executable, "-m", "tests.support.carried_column", dsn, target_dsn]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {way: way for way in WAYS}


TYPES = (
    "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
)


def test_columns_are_those_of_the_tables(connect: Connect) -> None:
    connection = connect()
    spelled = {"timestamptz": "timestamp with time zone"}
    for table, row in (("outbox", MESSAGE_ROW), ("outbox_executable", EXECUTABLE_ROW), ("inbox", MOVING)):
        found: dict[str, str] = dict(connection.execute(TYPES, [f"mailroom.{table}"]).fetchall())
        assert {column.name: spelled.get(column.type, column.type) for column in row}.items() <= found.items()
    defaults = "SELECT column_name, column_default FROM information_schema.columns WHERE table_name = 'outbox'"
    found = dict(connection.execute(defaults).fetchall())
    assert {
        column.name: f"{column.default}::{CHAR}" for column in MESSAGE_ROW if column.default
    }.items() <= found.items()


def test_version_1_of_the_wire_is_what_it_was() -> None:
    """Nodes of other releases read it."""
    assert VERSION == 1
    assert {name: kind for name, (kind, _, _) in WIRE_COLUMNS.items()} == {
        "seq": "bigint", "sent_clock": "bigint", "stamped_at": "timestamptz", "message_id": "uuid", "topic": "text",
        "key": "text", "kind": "text", "message_type": "text", "event_type": "text", "value": "bytea",
        "value_json": "text", "headers": "text", "expires_at": "timestamptz", "after_clock": "bigint",
        "source": "text", "sent_at": "timestamptz",
    }  # fmt: skip
    assert WIRE_COLUMNS["kind"] == ("text", "{c}::text", f"{{c}}::{CHAR}")
    assert WIRE_COLUMNS["headers"] == ("text", "{c}::text", "{c}::jsonb")


def test_lists_of_columns() -> None:
    assert MESSAGE.split(", ")[:3] == ["message_id", "topic", "key"]
    assert "deliver_at" not in MESSAGE.split(", ")
    assert f"inbox, clock, sent_clock, origin, delivered_at, {MESSAGE}" == DELIVERED
    assert set(PLAIN) == {CHAR, "jsonb", "smallint"}
