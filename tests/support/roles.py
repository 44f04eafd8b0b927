"""Roles of a test's own, with a login: some with exactly the rights that `mailroom grant` gives."""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from secrets import token_hex

import psycopg
from sqlalchemy import make_url

from mailroom.roles.statements import GrantedInbox, fixed_atoms, grants, inbox_atoms, schema_atoms

SCHEMA = "mailroom"


def rights(
    purpose: str, *inboxes: str, bounded: Collection[str] = (), staging: str | None = None, log: str | None = None
) -> list[str]:
    """Return the statements that give `{role}` what the matrix says for a purpose; `bounded` are such inboxes.

    They read this `log`, if one is given.
    """
    atoms = set(schema_atoms(SCHEMA, purpose, staging)) | fixed_atoms(purpose)
    for inbox in inboxes:
        atoms |= inbox_atoms(purpose, GrantedInbox(inbox, inbox in bounded, log))
    return grants(SCHEMA, "{role}", atoms)


def named(statements: Iterable[str], role: str) -> str:
    """Return statements of `rights` as one text for this role."""
    return "; ".join(statements).replace("{role}", role)


@contextlib.contextmanager
def role(dsn: str, *grants: str, owns: str | None = None) -> Iterator[tuple[str, str]]:
    """Make a role that may log in; yield its name and the connection string with which it does.

    In `grants`, which run one after another, `{role}` is its name. `owns` is a schema that it is given, with all that
    stands in it; it is given back at the end.
    """
    name = f"mailroom_test_{token_hex(8)}"
    given = make_url(dsn).set(username=name, password="weak").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'weak'")
        try:
            for grant in grants:
                connection.execute(grant.replace("{role}", name).encode())
            if owns is not None:
                take_over(connection, owns, name)
            yield name, given
        finally:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = %s", [name]
            )
            connection.execute(f"REASSIGN OWNED BY {name} TO current_user; DROP OWNED BY {name}; DROP ROLE {name}")


def take_over(connection: psycopg.Connection, schema: str, owner: str) -> None:
    """Give a schema and all that stands in it to `owner`."""
    connection.execute(f"ALTER SCHEMA {schema} OWNER TO {owner}")
    # REASSIGN OWNED takes the whole database of a superuser, which the server refuses.
    connection.execute(
        f"""
DO $$ DECLARE each record; BEGIN
    FOR each IN SELECT oid::regclass AS name, relkind FROM pg_class WHERE relnamespace = '{schema}'::regnamespace
                AND relkind IN ('r', 'p', 'S', 'v') AND NOT EXISTS (
                    SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = pg_class.oid
                    AND deptype = 'i' AND relkind = 'S') LOOP
        EXECUTE format('ALTER %s %s OWNER TO {owner}', CASE each.relkind WHEN 'S' THEN 'SEQUENCE' WHEN 'v' THEN 'VIEW'
                       ELSE 'TABLE' END, each.name);
    END LOOP;
    FOR each IN SELECT oid::regprocedure AS name FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO {owner}', each.name);
    END LOOP;
END $$"""
    )
