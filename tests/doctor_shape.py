"""The indexes and triggers that a schema should have: `python -m tests.doctor_shape` writes them for the doctor."""

from pathlib import Path
from typing import Any

import psycopg

import mailroom.doctor
from mailroom.embedded import find_binaries
from tests.support.databases import Databases
from tests.support.postgres import Servers, run_directory

FILE = Path(mailroom.doctor.__file__).parent / "expected.py"
INDEXES = """
SELECT c.relname::text, coalesce(
    'ALTER TABLE mailroom.' || t.relname || ' ADD CONSTRAINT ' || k.conname || ' ' || pg_get_constraintdef(k.oid),
    pg_get_indexdef(i.indexrelid)) || ';'
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_class AS t ON t.oid = i.indrelid
LEFT JOIN pg_constraint AS k ON k.conindid = i.indexrelid AND k.conrelid = i.indrelid
WHERE t.relnamespace = 'mailroom'::regnamespace ORDER BY 1
"""
TRIGGERS = """
SELECT t.relname::text, g.tgname::text, g.tgenabled::text, pg_get_triggerdef(g.oid) || ';' || CASE g.tgenabled
    WHEN 'A' THEN format(' ALTER TABLE mailroom.%I ENABLE ALWAYS TRIGGER %I;', t.relname, g.tgname)
    WHEN 'R' THEN format(' ALTER TABLE mailroom.%I ENABLE REPLICA TRIGGER %I;', t.relname, g.tgname) ELSE '' END
FROM pg_trigger AS g JOIN pg_class AS t ON t.oid = g.tgrelid
WHERE t.relnamespace = 'mailroom'::regnamespace AND NOT g.tgisinternal ORDER BY 1, 2
"""


def expected(connection: psycopg.Connection[Any]) -> str:
    """Return the file, as a new node of the schema `mailroom` has it."""
    lines = ['"""The indexes and triggers that a node should have: `python -m tests.doctor_shape` writes them."""', ""]
    lines += ["# fmt: off", "# ruff: noqa: E501", "", "# By name, with what makes it.", "INDEXES = {"]
    lines += [f"    {name!r}: {_text(made)}," for name, made in connection.execute(INDEXES)]
    lines += [
        "}",
        "",
        "# By table and name: when it fires (O origin, A always, R replica), and what makes it.",
        "TRIGGERS = {",
    ]
    for table, name, enabled, made in connection.execute(TRIGGERS):
        lines.append(f"    ({table!r}, {name!r}): ({enabled!r}, {_text(made)}),")
    return "\n".join([*lines, "}", ""])


def _text(made: str) -> str:
    # Of a partitioned table the server tells how to make one that its partitions lack.
    return repr(made.replace(" ON ONLY ", " ON ").replace("mailroom.", "{schema}."))


def main() -> None:
    """Write the file."""
    with run_directory() as directory:
        servers = Servers(directory)
        databases = Databases(servers.dsn(find_binaries().major), "shape")
        with psycopg.connect(databases.create(migrated=True)) as connection:
            FILE.write_text(expected(connection))
        databases.drop_all()
        databases.close()
        servers.stop()


if __name__ == "__main__":
    main()
