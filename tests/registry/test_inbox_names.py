"""Inboxes whose names could clash with other relations: each has a partition of its own, or is refused."""

from collections.abc import AsyncIterator
from itertools import permutations

import psycopg
import pytest

from dispatcher.housekeeping.janitor import Janitor
from mailroom import create_inbox
from mailroom.errors import InvalidName, SchemaError
from tests.support.node import Node
from tests.support.noted import END

LONGEST = "x" * 41


@pytest.fixture
async def keeper(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


def test_inboxes_named_like_an_index_of_another_get_their_messages(node: Node) -> None:
    """In whatever order they are made."""
    names = [f"wall{nth}{end}" for nth, ends in enumerate(permutations(["", "_clock", "_pkey"])) for end in ends]
    for name in names:
        node.inbox(name, "said")
        node.inbox(name)
    node.send("said")
    node.deliver_all()
    assert node.delivered("inbox::text, tableoid::regclass::text") == sorted(
        (name, f"mailroom.inbox_{name}") for name in names
    )
    assert node.value("SELECT count(*) FROM mailroom.dead_letter") == 0


def test_longest_names_do_not_meet(node: Node) -> None:
    names = [LONGEST, LONGEST[1:] + "y"]
    for name in names:
        node.inbox(name, "said")
    node.send("said")
    assert node.deliver_all().delivered == 2


def test_inbox_may_not_have_the_name_of_a_relation_of_ours(node: Node) -> None:
    # Another relation whose name starts like those of partitions would take the name of a possible inbox.
    ours = node.rows(
        "SELECT relname FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace AND relname ^@ 'inbox_' "
        "UNION SELECT typname FROM pg_type WHERE typnamespace = 'mailroom'::regnamespace AND typname ^@ 'inbox_'"
    )
    assert sorted(ours) == [("inbox_registry",), ("inbox_registry_pkey",)]
    with pytest.raises(InvalidName, match=r"inbox_registry is a table of Mailroom's own\." + END):
        node.inbox("registry")
    with pytest.raises(SchemaError, match=r"inbox_registry_pkey, and something else"):
        node.inbox("registry_pkey")


TAKEN = {
    "table": "CREATE TABLE mailroom.inbox_wall (LIKE mailroom.inbox)",
    "view": "CREATE VIEW mailroom.inbox_wall AS SELECT 1",
    "index": "CREATE INDEX inbox_wall ON mailroom.dead_letter (failed_at)",
    "sequence": "CREATE SEQUENCE mailroom.inbox_wall",
    "composite type": "CREATE TYPE mailroom.inbox_wall AS (clock bigint)",
    "enum": "CREATE TYPE mailroom.inbox_wall AS ENUM ('brick')",
    "domain": "CREATE DOMAIN mailroom.inbox_wall AS text",
    "partition of another inbox": "CREATE TABLE mailroom.inbox_wall PARTITION OF mailroom.inbox FOR VALUES IN ('roof')",
    "partition of two": "CREATE TABLE mailroom.inbox_wall PARTITION OF mailroom.inbox FOR VALUES IN ('wall', 'roof')",
    "partition of another table": "CREATE TABLE mailroom.x (LIKE mailroom.inbox) PARTITION BY LIST (inbox); "
    "CREATE TABLE mailroom.inbox_wall PARTITION OF mailroom.x FOR VALUES IN ('wall')",
}


def test_name_that_something_else_has_is_refused_and_nothing_changes(node: Node) -> None:
    refused = r"Inbox 'wall' cannot be created: .* mailroom\.inbox_wall, and something"
    for taken, statements in TAKEN.items():
        with node.connection.transaction(force_rollback=True):
            node.connection.execute(statements.encode())
            node.connection.execute("SET LOCAL lock_timeout = '7s'")
            with pytest.raises(SchemaError, match=refused):
                create_inbox(node.connection, "wall", ["said"])
            assert node.value("SELECT current_setting('lock_timeout')") == "7s", taken
            assert node.rows("SELECT name FROM mailroom.inbox_registry") == [], taken
            assert node.rows("SELECT inbox FROM mailroom.subscription") == [], taken


def test_partition_that_was_detached_is_not_taken_for_the_inbox(node: Node) -> None:
    node.inbox("wall", "said")
    node.connection.execute("ALTER TABLE mailroom.inbox DETACH PARTITION mailroom.inbox_wall")
    with pytest.raises(SchemaError, match="something else has that name"), node.connection.transaction():
        create_inbox(node.connection, "wall", ["said"])
    node.connection.execute("DROP TABLE mailroom.inbox_wall")
    with node.connection.transaction():
        create_inbox(node.connection, "wall", ["said"])
    node.send("said")
    assert node.deliver_all().delivered == 1


def test_existing_inbox_is_recognized_whatever_the_settings(node: Node) -> None:
    node.inbox("wall")
    for setting, other in (("quote_all_identifiers = on", "roof"), ("standard_conforming_strings = off", "door")):
        node.connection.execute("RESET ALL")
        node.connection.execute(f"SET {setting}".encode())
        node.inbox("wall", "said")
        node.inbox(other, "said")
    node.send("said")
    assert node.deliver_all().delivered == 3


async def test_housekeeping_passes_over_what_is_no_inbox(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier release registered them without a partition; an index had the name of the first.
    node.inbox("wall", "said")
    node.connection.execute("INSERT INTO mailroom.inbox_registry (name) VALUES ('wall_clock'), ('registry'), ('gone')")
    node.connection.execute("CREATE INDEX inbox_wall_clock ON mailroom.inbox_wall (clock)")
    monkeypatch.setattr("dispatcher.housekeeping.janitor.STEP", 1)
    node.send("said")
    node.deliver_all()
    node.connection.execute("DELETE FROM mailroom.inbox_wall")
    assert await Janitor("mailroom").run_once(keeper) == 1
    assert node.rows("SELECT name FROM mailroom.inbox_registry WHERE floor > 0") == [("wall",)]
