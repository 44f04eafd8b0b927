"""Watched tables: a random program of statements amounts to its messages, replayed."""

from collections import Counter
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import Connection
from psycopg.rows import TupleRow

from mailroom import watch
from tests.support.databases import Connect
from tests.support.watched import replayed, told
from tests.watch.test_watch_statements import PARTITIONED

pytestmark = pytest.mark.both_versions

TABLES = {
    "plain": """CREATE TABLE things (id int PRIMARY KEY, part int NOT NULL DEFAULT 1, name text, hidden int,
                above int REFERENCES things ON DELETE SET NULL)""",
    "deferrable": """CREATE TABLE things (id int PRIMARY KEY, part int NOT NULL DEFAULT 1, name text,
                     hidden int, above int)""",
    "cascading": """CREATE TABLE things (id int PRIMARY KEY, part int NOT NULL DEFAULT 1, name text, hidden int,
                    above int REFERENCES things ON DELETE CASCADE ON UPDATE CASCADE)""",
    "partitioned": f"{PARTITIONED}; ALTER TABLE things ADD hidden int, ADD above int",
}

ids = st.integers(1, 6)
parts = st.integers(1, 3)
names = st.sampled_from(["NULL", "'a'", "'b'", "'é'"])
numbers = st.sampled_from(["NULL", "1", "2"])
conditions = st.one_of(
    st.just("true"),
    ids.map("id = {}".format),
    ids.map("id > {}".format),
    names.map("name IS DISTINCT FROM {}".format),
    st.just("id = part"),
)
# Where a row refers to another, or to itself.
aboves = st.sampled_from(["NULL", "id", "(SELECT min(t.id) FROM things t)", "(SELECT max(t.id) FROM things t)"])
assignments = st.lists(
    st.one_of(
        names.map("name = {}".format),
        parts.map("part = {}".format),
        numbers.map("hidden = {}".format),
        st.sampled_from(["id = id + 1", "id = 7 - id", "id = id", "id = id % 6 + 1", "part = part % 3 + 1"]),
        aboves.map("above = {}".format),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda text: text.split()[0],
).map(", ".join)
rows = st.lists(st.tuples(ids, parts, names, numbers), min_size=1, max_size=4, unique_by=lambda row: row[0])


def values(given: list[tuple[int, int, str, str]]) -> str:
    return ", ".join(f"({id}, {part}, {name}, {hidden}::int)" for id, part, name, hidden in given)


@st.composite
def statements(draw: st.DrawFn, kind: str) -> str:
    new, where, changes = values(draw(rows)), draw(conditions), draw(assignments)
    choices = [
        f"INSERT INTO things (id, part, name, hidden) VALUES {new}",
        f"UPDATE things SET {changes} WHERE {where}",
        f"DELETE FROM things WHERE {where}",
        "TRUNCATE things CASCADE",
        (
            f"MERGE INTO things USING (VALUES {new}) AS s (sid, spart, sname, shidden) ON id = sid "
            f"WHEN MATCHED AND shidden = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET {changes} "
            "WHEN NOT MATCHED THEN INSERT (id, part, name, hidden) VALUES (sid, spart, sname, shidden)"
        ),
        (
            f"WITH gone AS (DELETE FROM things WHERE {where} RETURNING *) "
            "INSERT INTO things (id, part, name, hidden) SELECT id + 10, part, name, hidden FROM gone"
        ),
    ]
    if kind != "deferrable":  # whose key decides no conflict
        choices += [
            f"INSERT INTO things (id, part, name, hidden) VALUES {new} ON CONFLICT DO NOTHING",
            (
                f"INSERT INTO things (id, part, name, hidden) VALUES {new} "
                f"ON CONFLICT ({'id, part' if kind == 'partitioned' else 'id'}) DO UPDATE SET "
                "name = excluded.name, hidden = excluded.hidden"
            ),
        ]
    if kind == "partitioned":
        choices += [
            f"INSERT INTO things_2 (name, id, part) VALUES ({draw(names)}, {draw(ids)}, 2)",
            f"UPDATE things_2 SET name = {draw(names)} WHERE {where}",
            f"DELETE FROM things_1 WHERE {where}",
        ]
    return draw(st.sampled_from(choices))


def table(connection: Connection[TupleRow]) -> list[Any]:
    return [row for (row,) in connection.execute("SELECT to_jsonb(t) - 'hidden' FROM things AS t")]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", TABLES)
def test_random_program_amounts_to_its_messages(connect: Connect, kind: str) -> None:
    connection = connect(autocommit=True)
    connection.execute(TABLES[kind].encode())
    with connection.transaction():
        watch(connection, "public.things", topic="thing", without="hidden")
    if kind == "deferrable":  # refused, but it lets one statement use the keys of many rows for others
        connection.execute("ALTER TABLE things DROP CONSTRAINT things_pkey, ADD PRIMARY KEY (id) DEFERRABLE")
    seen = Counter[str]()

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(st.lists(st.lists(statements(kind), min_size=1, max_size=3), min_size=1, max_size=6))
    def check(transactions: list[list[str]]) -> None:
        connection.execute("SET mailroom.watch = off; TRUNCATE things CASCADE; RESET mailroom.watch")
        model: dict[str, Any] = {}
        for transaction in transactions:
            # One that breaks a constraint changes nothing and tells nothing.
            with suppress(psycopg.IntegrityError, psycopg.errors.CardinalityViolation), connection.transaction():
                for statement in transaction:
                    connection.execute(statement.encode())
            messages = told(connection)
            seen.update(message.event for message in messages)
            model = replayed(messages, model)
            assert sorted(model.values(), key=repr) == sorted(table(connection), key=repr)

    check()
    assert min(seen[event] for event in "CUD") > 20
