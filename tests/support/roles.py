"""Roles with exactly the rights that the pages tell to grant."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit, urlunsplit

from tests.support.node import Node

DOCS = Path(__file__).parents[2] / "docs"


def grants_of(page: str, first: str, **names: str) -> str:
    """Return the SQL block of the page that begins with `first`, with other names in place of those it has."""
    [grants] = re.findall(rf"```sql\n({re.escape(first)}.*?)```", (DOCS / page).read_text(), re.S)
    for name, own in names.items():
        grants = grants.replace(name, own)
    return str(grants)


def grants_of_a_consumer(role: str, inbox: str) -> str:
    """Return what makes `role` a consumer of `inbox` that sends nothing."""
    names = {"shop_shipping": role, "inbox_shipping": f"inbox_{inbox}"}
    return grants_of("sql.md", "CREATE ROLE shop_shipping LOGIN;", **names)


def grants_of_a_writer(role: str) -> str:
    """Return what makes `role` a writer."""
    return grants_of("sql.md", "CREATE ROLE shop_writer LOGIN;", shop_writer=role)


@contextlib.contextmanager
def made(node: Node, *grants: str, role: str) -> Iterator[str]:
    """Make a role that may log in, by `grants`; give the DSN of its sessions, and drop the role afterwards."""
    for grant in grants:
        node.connection.execute(grant.encode())
    node.connection.execute(f"ALTER ROLE {role} LOGIN PASSWORD 'weak'".encode())
    parts = urlsplit(node.dsn)
    try:
        yield urlunsplit(parts._replace(netloc=f"{role}:weak@{parts.hostname}:{parts.port}"))
    finally:
        node.rows("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = %s", role)
        node.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@contextlib.contextmanager
def consumer_of(node: Node, inbox: str) -> Iterator[str]:
    """Make a consumer of `inbox`; give the DSN of its sessions."""
    role = f"mailroom_test_{token_hex(8)}"
    with made(node, grants_of_a_consumer(role, inbox), role=role) as dsn:
        yield dsn
