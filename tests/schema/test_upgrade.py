"""Upgrades from every released revision; and the schema of each, as the files in `tests/schema` have it."""

from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from inbox import Inbox
from mailroom import create_inbox, schema
from mailroom.cli.root import root
from mailroom.embedded import Binaries
from mailroom.errors import SchemaError
from mailroom.testing import deliver
from tests.dump import FILES, MAJOR, RELEASED, dump
from tests.schema.test_migrate import described
from tests.support.command import alembic
from tests.support.databases import Databases
from tests.support.next_release import HEAD, NEXT, known_to_migrate

pytestmark = pytest.mark.both_versions

ROOT = Path(__file__).parents[2]
ANEW = "tests/schema is out of date; this writes it anew: python -m tests.dump"
REVISIONS = sorted({*RELEASED.values(), HEAD})
ROWS = """
INSERT INTO mailroom.alembic_version VALUES ('{revision}');
INSERT INTO mailroom.node DEFAULT VALUES;
INSERT INTO mailroom.outbox (topic, key, value_json) VALUES ('shipping', 'a', '1'), ('shipping', 'a', '2');
INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, value_json, sent_at)
VALUES ('deliver', 'no inbox', gen_random_uuid(), 'nobody', 'b', 'M', 'U', '3', now());
"""


def make(dsn: str, revision: str) -> None:
    """Make a node as a release with this revision left it, with messages."""
    with psycopg.connect(dsn) as connection:
        connection.execute((FILES / f"{revision}.sql").read_bytes())
        connection.execute(ROWS.format(revision=revision).encode())


def check_messages(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        create_inbox(connection, "shipping")
        assert deliver(connection) == 2
        assert [message.value for message in Inbox("shipping").reap(connection, "a")] == [1, 2]
        assert connection.execute("SELECT topic, value_json FROM mailroom.dead_letter").fetchall() == [("nobody", 3)]


def test_schema_is_the_one_in_its_file(dsn: str, binaries: Binaries) -> None:
    if binaries.major != MAJOR:
        pytest.skip(f"the files are written by PostgreSQL {MAJOR}")
    assert dump(binaries, dsn) == (FILES / f"{HEAD}.sql").read_text(), ANEW


def test_each_released_revision_and_the_newest_one_has_a_file() -> None:
    assert sorted(file.stem for file in FILES.glob("*.sql")) == REVISIONS


@pytest.mark.parametrize("revision", REVISIONS)
def test_node_of_a_released_revision_becomes_what_a_new_one_is(revision: str, empty_dsn: str, dsn: str) -> None:
    make(empty_dsn, revision)
    schema.migrate(empty_dsn)
    assert described(empty_dsn) == described(dsn)
    check_messages(empty_dsn)


@pytest.mark.slow
@pytest.mark.parametrize("revision", REVISIONS)
def test_node_of_a_released_revision_goes_on_to_the_next_release(
    revision: str, empty_dsn: str, databases: Databases
) -> None:
    make(empty_dsn, revision)
    new = databases.create(migrated=False)
    with known_to_migrate():
        schema.migrate(empty_dsn, revision=NEXT)
        schema.migrate(new, revision=NEXT)
        assert described(empty_dsn) == described(new)
        databases.drop(new)
        check_messages(empty_dsn)
        schema.migrate(empty_dsn, revision=HEAD)
    with psycopg.connect(empty_dsn) as connection:
        schema.check(connection)


def test_node_of_a_revision_that_was_never_released_is_refused_and_told_what_to_do(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE mailroom.alembic_version SET version_num = '0120'")
    told = (
        f"Schema 'mailroom' is at revision 0120, from before the first release, which begins at {schema.revisions()[0]}"
    )
    for revision in ("head", "base"):
        with pytest.raises(SchemaError, match=told):
            schema.migrate(dsn, revision=revision)
    assert told in CliRunner().invoke(root, ["migrate", "--dsn", dsn]).stderr
    with pytest.raises(SchemaError, match=told):
        alembic("-x", f"dsn={dsn}", "upgrade", "head")
    with psycopg.connect(dsn) as connection:
        assert schema.current_revision(connection) == "0120"
