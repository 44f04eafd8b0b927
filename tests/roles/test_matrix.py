"""The matrix of rights against the server's catalog: a role has what it says, and nothing else in the schema."""

import psycopg
import pytest

from mailroom.roles.matrix import PURPOSES
from mailroom.roles.statements import Atom, GrantedInbox, Thing, covered, fixed_atoms, inbox_atoms
from tests.roles_page import tables
from tests.support.node import Node
from tests.support.pages import page_named
from tests.support.roles import rights, role

pytestmark = [
    pytest.mark.both_versions, pytest.mark.inbox("shipping"), pytest.mark.inbox("ledger", order="total"),
]  # fmt: skip

PAGE = page_named("roles.md").read_text()
INBOXES = (GrantedInbox("shipping"), GrantedInbox("ledger", is_bounded=True))

# What a role may do with each object and column of the schema, by whatever way it has got that.
MAY = """
SELECT 'table', c.relname, p, NULL FROM pg_class AS c,
       unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS p
WHERE c.relnamespace = 'mailroom'::regnamespace AND c.relkind IN ('r', 'p', 'v')
  AND has_table_privilege(%(role)s, c.oid, p)
UNION ALL
SELECT 'table', c.relname, p, a.attname FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid,
       unnest('{SELECT,INSERT,UPDATE,REFERENCES}'::text[]) AS p
WHERE c.relnamespace = 'mailroom'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND a.attnum > 0
  AND NOT a.attisdropped AND has_column_privilege(%(role)s, c.oid, a.attnum, p)
UNION ALL
SELECT 'sequence', c.relname, p, NULL FROM pg_class AS c, unnest('{SELECT,UPDATE,USAGE}'::text[]) AS p
WHERE c.relnamespace = 'mailroom'::regnamespace
  AND CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(%(role)s, c.oid, p) END
UNION ALL
SELECT 'function', f.proname, 'EXECUTE', NULL FROM pg_proc AS f
WHERE f.pronamespace = 'mailroom'::regnamespace AND has_function_privilege(%(role)s, f.oid, 'EXECUTE')
UNION ALL
SELECT 'schema', 'mailroom', p, NULL FROM unnest('{USAGE,CREATE}'::text[]) AS p
WHERE has_schema_privilege(%(role)s, 'mailroom', p)
"""


def may(node: Node, name: str) -> frozenset[Atom]:
    rows = node.connection.execute(MAY, {"role": name}).fetchall()
    return frozenset(Atom(Thing(kind, of), privilege, column) for kind, of, privilege, column in rows)


def of_matrix(purpose: str) -> frozenset[Atom]:
    return fixed_atoms(purpose).union(*(inbox_atoms(purpose, inbox) for inbox in INBOXES))


def test_roles_may_do_what_the_matrix_says_and_nothing_else(node: Node) -> None:
    names = [inbox.name for inbox in INBOXES]
    with role(node.dsn) as (name, _):
        everybody = may(node, name)
    for purpose, about in PURPOSES.items():
        inboxes = names if about.inboxes != "none" else []
        with role(node.dsn, *rights(purpose, *inboxes, bounded=["ledger"])) as (name, _):
            found = may(node, name) - everybody
        expected = of_matrix(purpose)
        # A privilege on a table is one on each of its columns.
        more = {atom for atom in found if not covered(atom, expected) and atom.thing.kind != "schema"}
        fewer = {atom for atom in expected if atom not in found}
        assert (more, fewer) == (set(), set()), purpose
        of_schema = {atom.privilege for atom in found if atom.thing.kind == "schema"}
        assert of_schema == ({"USAGE", "CREATE"} if about.creates else {"USAGE"})


def test_each_relation_of_the_schema_is_in_the_matrix(node: Node) -> None:
    """Who adds a table says who may do what with it."""
    relations = {
        name for (name,) in node.rows(
            "SELECT relname FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace "
            "AND relkind IN ('r', 'p', 'v', 'S')"
        )
    }  # fmt: skip
    named = {atom.thing.name for purpose in PURPOSES for atom in of_matrix(purpose)}
    missing = sorted(relations - named - {"my_due"})  # everybody may read that view, of his own inboxes
    assert not missing, (
        f"nobody but the owner may use {missing}: give each a row in mailroom/roles/matrix.py, for the purposes whose "
        "processes use it"
    )
    known = relations | {
        name for (name,) in node.rows("SELECT proname FROM pg_proc WHERE pronamespace = 'mailroom'::regnamespace")
    }
    assert named <= known, "the matrix names what the schema does not have"


# -- What a role may not do: of each, what others do ------------------------------------------------------------------

REFUSED = {
    "writer": (
        "SELECT value FROM mailroom.outbox",
        "DELETE FROM mailroom.outbox",
        "SELECT FROM mailroom.inbox",
    ),
    "jdbc-writer": (
        "INSERT INTO mailroom.outbox (topic) VALUES ('t')",
        "SELECT FROM mailroom.outbox_jdbc_id",
    ),
    "reaper": (
        "SELECT FROM mailroom.inbox_ledger",
        "SELECT FROM mailroom.key_state",
        "SELECT FROM mailroom.dead_letter",
    ),
    "dispatcher": (
        "INSERT INTO mailroom.subscription VALUES ('t', 'shipping')",
        "DELETE FROM mailroom.link",
        "DELETE FROM mailroom.node",
    ),
    "executor": (
        "DELETE FROM mailroom.outbox",
        "SELECT value FROM mailroom.dead_letter",
        "INSERT INTO mailroom.executable_function VALUES ('f', 's', 'f')",
    ),
    "operator": (
        "SELECT value FROM mailroom.outbox",
        "SELECT FROM mailroom.inbox_ledger",
        "DELETE FROM mailroom.audit",
        "UPDATE mailroom.node SET name = 'n'",
    ),
    "auditor": (
        "SELECT value FROM mailroom.outbox",
        "SELECT value_json FROM mailroom.inbox",
        "SELECT value FROM mailroom.parked",
        "SELECT value FROM mailroom.dead_letter",
        "SELECT value FROM mailroom.transit",
        "SELECT arguments FROM mailroom.outbox_executable",
        "SELECT FROM mailroom.store",
        "DELETE FROM mailroom.audit",
    ),
    "metrics": (
        "SELECT key FROM mailroom.outbox",
        "SELECT headers FROM mailroom.inbox",
        "SELECT last_error FROM mailroom.key_state",
        "SELECT FROM mailroom.audit",
    ),
    "link-reader": (
        "DELETE FROM mailroom.transit",
        "UPDATE mailroom.link SET state = 'open'",
        "SELECT FROM mailroom.outbox",
    ),
    "spark-writer": (
        "SELECT value FROM mailroom.outbox",
        "DELETE FROM mailroom.spark_batch",
    ),
    "spark-reader": (
        "SELECT FROM mailroom.spark_stream",
        "SELECT FROM mailroom.inbox_ledger",
    ),
}


def test_no_role_does_what_others_do(node: Node) -> None:
    for purpose, about in PURPOSES.items():
        inboxes = ["shipping"] if about.inboxes != "none" else []
        every = (
            *REFUSED[purpose],
            "TRUNCATE mailroom.outbox",
            *(() if about.creates else ["CREATE TABLE mailroom.mine ()"]),
        )
        with role(node.dsn, *rights(purpose, *inboxes)) as (_, dsn), psycopg.connect(dsn, autocommit=True) as session:
            for statement in every:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    session.execute(statement.encode())


# -- What a role may lock ---------------------------------------------------------------------------------------------

# Each mode on each relation; those that were locked in a mode that keeps others from writing. To lock a view or a
# parent locks what is below it, no matter who owns that.
LOCKED = """
CREATE FUNCTION pg_temp.locked() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE tried text; tried_mode text; found text[] := '{}';
BEGIN
    FOR tried, tried_mode IN
        SELECT c.oid::regclass, m FROM pg_class AS c, unnest(ARRAY['ACCESS SHARE', 'ROW SHARE', 'ROW EXCLUSIVE',
            'SHARE UPDATE EXCLUSIVE', 'SHARE', 'SHARE ROW EXCLUSIVE', 'EXCLUSIVE', 'ACCESS EXCLUSIVE']) AS m
        WHERE c.relnamespace = 'mailroom'::regnamespace AND c.relkind IN ('r', 'p', 'v')
    LOOP
        BEGIN
            EXECUTE format('LOCK TABLE %s IN %s MODE NOWAIT', tried, tried_mode);
            found := found || ARRAY(
                SELECT relation::regclass::text FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation'
                AND relation IN (SELECT oid FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace)
                AND mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock'));
            RAISE division_by_zero;
        EXCEPTION WHEN division_by_zero OR insufficient_privilege THEN NULL;
        END;
    END LOOP;
    RETURN found;
END $$
"""
# Who works for the whole node may hold it up. All others lock what is theirs alone.
OF_EXECUTOR = {"accounting", "dead_letter", "executable_cursor", "execute_turn", "lease", "outbox_executable", "store"}
MAY_LOCK = {
    "reaper": {"inbox_shipping"},
    "spark-reader": {"inbox_shipping"},
    "executor": OF_EXECUTOR,
    "dispatcher": OF_EXECUTOR | {
        "attempt", "audit", "bridge_done", "bridge_last", "bridge_mark", "bridge_parts", "bridge_position",
        "commit_token", "dispatch_turn", "fan_out", "fan_out_way", "inbox_shipping", "key_state", "known", "outbox",
        "outbox_jdbc_id", "receipt", "scheduled", "spark_batch", "stable", "stat_minute", "transit",
        "log_tick", "log_receipt",
    },
    "operator": {
        "dead_letter", "dispatch_turn", "inbox_shipping", "key_state", "outbox", "outbox_jdbc_id", "parked", "periodic",
        "scheduled",
    },
}  # fmt: skip


def test_roles_lock_no_more_than_is_said_here(node: Node) -> None:
    """A right to DELETE, or to UPDATE all columns, is one to lock the table, and through a view the one below it."""
    for purpose, about in PURPOSES.items():
        inboxes = ["shipping"] if about.inboxes != "none" else []
        with role(node.dsn, *rights(purpose, *inboxes)) as (_, dsn), psycopg.connect(dsn) as session:
            session.execute(LOCKED)
            [(found,)] = session.execute("SELECT pg_temp.locked()").fetchall()
        assert {name.removeprefix("mailroom.") for name in found} == MAY_LOCK.get(purpose, set()), purpose


# -- The page ---------------------------------------------------------------------------------------------------------


def test_page_has_the_matrix() -> None:
    assert tables() in PAGE, "docs/operate/roles.md is out of date: python -m tests.roles_page"
