"""Roles of a test's own, with a login: some with exactly the rights that the pages tell to grant."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import psycopg
from sqlalchemy import make_url

DOCS = Path(__file__).parents[2] / "docs"


def documented_role(page: str, role: str) -> list[str]:
    """Return the statements of a page that give a role its rights, with `{role}` for its name."""
    created, *grants = documented(page, f"CREATE ROLE {role} LOGIN;")
    assert created.startswith("CREATE ROLE")
    return [grant.replace(role, "{role}") for grant in grants]


def grants_of_a_consumer(inbox: str) -> list[str]:
    """Return what makes `{role}` a consumer of `inbox` that sends nothing."""
    return [each.replace("inbox_shipping", f"inbox_{inbox}") for each in documented_role("sql.md", "shop_shipping")]


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


def documented(page: str, first: str) -> list[str]:
    """Return the statements of the SQL block of a page that begins with `first`, without its comments."""
    [block] = [text for text in re.findall(r"```sql\n(.*?)```", (DOCS / page).read_text(), re.S) if first in text]
    return [each.strip() for each in re.sub(r"--.*", "", block).split(";") if each.strip()]
