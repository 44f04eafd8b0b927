"""`mailroom doctor` and `mailroom explain M001`: what they print, how they end, and the page of all findings."""

import json
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from mailroom.cli.commands.doctor import OPTIONS, doctor
from mailroom.cli.commands.explain import explain
from mailroom.cli.options import share
from mailroom.cli.root import ABOUT
from mailroom.doctor import examining
from mailroom.doctor.examining import CHECKS, NOT_SEEN, POOLED
from mailroom.doctor.kinds import KINDS
from mailroom.session.settings import DSN_VARIABLE, LIBPQ_VARIABLES
from tests.doctor_shape import FILE, expected
from tests.support.node import Node
from tests.support.pages import page_named
from tests.support.pgbouncer import pgbouncer

PAGE = page_named("doctor.md")
share(doctor)


def call(dsn: str | None, *arguments: str, **environment: str) -> Result:
    """Call the command as from the root; it names the database `dsn` and no other."""
    names: dict[str, str | None] = dict.fromkeys((*LIBPQ_VARIABLES, "COLUMNS"))
    return CliRunner().invoke(doctor, arguments, env=names | {DSN_VARIABLE: dsn} | environment)


@pytest.fixture
def on_a_safe_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of tests are not durable, and the doctor says so: without these checks a new node is well."""
    monkeypatch.setattr(examining, "CHECKS", tuple(each for each in CHECKS if each.id not in ("M028", "M029")))


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_safe_server")
def test_exit_codes_and_json(node: Node) -> None:
    well = call(node.dsn)
    assert (well.exit_code, well.stdout) == (0, "Nothing found.\n")
    assert json.loads(call(node.dsn, "--json").stdout) == []
    node.connection.execute("ALTER TABLE mailroom.outbox SET (autovacuum_enabled = off)")
    found = call(node.dsn, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout) == [
        {
            "id": "M008",
            "what": "autovacuum is off for a table",
            "evidence": ["mailroom.outbox"],
            "command": "ALTER TABLE mailroom.outbox RESET (autovacuum_enabled);",
        }
    ]
    assert call(node.dsn, "--connections-share", "0").stdout.count("run: ") == 2
    for result in (call(node.dsn, "--schema", "nowhere"), call(node.dsn + "_gone"), call(node.dsn, "--lock-s", "-1")):
        assert result.exit_code == 2
        assert result.stderr.startswith("mailroom: error: ")
        assert result.stdout == ""


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_safe_server")
def test_output_fits_the_screen(node: Node) -> None:
    node.connection.execute(
        "DROP TRIGGER doorbell ON mailroom.outbox; INSERT INTO mailroom.subscription VALUES ('a', 'b')"
    )
    for columns in (60, 80, 120):
        shown = call(node.dsn, COLUMNS=str(columns)).stdout
        assert max(map(len, shown.splitlines())) <= columns
        assert shown.startswith("M015  a subscription is of no inbox\n      b has subscribed to a\nrun:  DELETE FROM")
        assert shown.endswith("\nWhat it means: mailroom explain M015\n")


def test_pooler_is_found(node: Node, server_home: Path) -> None:
    with pgbouncer(node.dsn, server_home) as url:
        found = {each["id"] for each in json.loads(call(url, "--json").stdout)}
    assert POOLED in found


def test_every_check_and_no_other_is_explained_and_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(KINDS) == sorted({check.id for check in CHECKS} | {NOT_SEEN, POOLED})
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| M")]
    assert rows == [f"| {id} | {kind.what} | {kind.means} | {kind.remedy} |" for id, kind in KINDS.items()]
    told = CliRunner().invoke(explain, ["M003"]).stdout
    assert told.startswith("# M003: a replication slot is far behind\n\nIt keeps dead rows or WAL.")
    assert "M003" in CliRunner().invoke(explain, []).stdout
    assert "Did you mean M" in CliRunner().invoke(explain, ["M0033"]).output


def test_root_knows_the_command() -> None:
    assert doctor.help is not None
    assert doctor.help.startswith(ABOUT["doctor"])
    assert {option for each in OPTIONS for option in each.opts} <= {o for each in doctor.params for o in each.opts}


def test_expected_shape_is_that_of_a_new_node(node: Node) -> None:
    """`python -m tests.doctor_shape` writes it."""
    with psycopg.connect(node.dsn) as connection:
        assert FILE.read_text() == expected(connection)
