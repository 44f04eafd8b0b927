"""Grant a database role what it needs for a purpose, and take it back."""

from collections.abc import Iterable
from dataclasses import dataclass

from mailroom.errors import ConfigurationError, InvalidName, UnknownInbox
from mailroom.order.total import IS_BOUNDED
from mailroom.roles.matrix import PURPOSES
from mailroom.roles.statements import (
    Atom,
    Atoms,
    GrantedInbox,
    Thing,
    covered,
    fixed_atoms,
    grants,
    inbox_atoms,
    revokes,
    schema_atoms,
)
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.schema.checks import checking
from mailroom.sql import locks
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, Statement
from mailroom.values.names import DEFAULT_SCHEMA, inbox_name, meant, schema_name, shown, utf8

MAX_ROLE_BYTES = 63  # PostgreSQL cuts longer names, and would mean another role


@dataclass(frozen=True, slots=True)
class RightsChange:
    """What a grant or a revoke did: its `statements`, in order, and the `inboxes` that they were for.

    `kept` are the other purposes for which a revoke found that the role has all rights, and keeps them; without those
    that are a part of another one.
    """

    statements: tuple[str, ...]
    inboxes: tuple[str, ...]
    kept: tuple[str, ...] = ()


def granting(
    purpose: str,
    role: str,
    *,
    inboxes: Iterable[str] | None = None,
    staging_schema: str | None = None,
    actor: str,
    why: str | None = None,
    dry_run: bool = False,
    schema: str = DEFAULT_SCHEMA,
) -> Operation[RightsChange]:
    """Give a database role exactly the rights that it needs for a purpose, and return the statements that did it.

    `purpose` is one of those that `mailroom grant` lists, such as `writer` or `reaper`. A `reaper` and a `spark-reader`
    need `inboxes`; an `operator` may be limited to some, by default it gets all. Other purposes take none: a
    `dispatcher` gets all that exist. An inbox that is created later needs another grant for those that have single
    inboxes: repeating one is harmless. `staging_schema` is where a `spark-writer` makes its tables, if not in the
    node's schema.

    In the caller's transaction, as the owner of the schema. No inbox is created before it ends. `actor` says who acts
    and `why` gives the reason; both are written to the table `audit`. With `dry_run` nothing is changed, and the role
    need not exist yet.

    Raises `ConfigurationError` for another purpose, for inboxes that are missing or not taken, if there is no such
    role, for PUBLIC and for the owner of the schema; `InvalidName`; `UnknownInbox`; `SchemaError` unless the schema
    fits; and `InvalidMessage` for a wrong `actor` or `why`.
    """
    call = _checked(purpose, role, inboxes, staging_schema, actor, why, schema)
    return _granting(call, actor, why, dry_run=dry_run)


def revoking(
    purpose: str,
    role: str,
    *,
    inboxes: Iterable[str] | None = None,
    staging_schema: str | None = None,
    actor: str,
    why: str | None = None,
    dry_run: bool = False,
    schema: str = DEFAULT_SCHEMA,
) -> Operation[RightsChange]:
    """Take back what `grant` with the same arguments has given, and return the statements that did it.

    What the role needs for its other purposes stays. These are the purposes for which it has all rights, by grants to
    itself; for one of inboxes, in those that are not revoked. One that is a part of the revoked purpose, as `executor`
    is of `dispatcher`, is taken with it: grant it again. Arguments, transaction, audit and errors are as for `grant`.
    """
    call = _checked(purpose, role, inboxes, staging_schema, actor, why, schema)
    return _revoking(call, actor, why, dry_run=dry_run)


grant, grant_async = on_connections("grant", granting)
revoke, revoke_async = on_connections("revoke", revoking)


@dataclass(frozen=True, slots=True)
class _Call:
    """Checked arguments; `named` are the inboxes, None for all."""

    purpose: str
    role: str
    named: tuple[str, ...] | None
    staging: str | None
    schema: str


def _checked(
    purpose: str, role: str, inboxes: Iterable[str] | None, staging: str | None, actor: str, why: str | None,
    schema: str,
) -> _Call:  # fmt: skip
    check_actor(actor, why)
    if purpose not in PURPOSES:
        raise ConfigurationError(
            f"There is no purpose {shown(purpose)}. There are: {', '.join(PURPOSES)}.", code="MR-invalid-argument"
        )
    if isinstance(inboxes, str):
        raise ConfigurationError("inboxes is one text: give a list of names.", code="MR-invalid-argument")
    named = None if inboxes is None else tuple(dict.fromkeys(map(inbox_name, inboxes)))
    takes = PURPOSES[purpose].inboxes
    if takes == "named" and not named:
        raise ConfigurationError(
            f"A {purpose} is one of certain inboxes: say which (--inbox NAME, repeatable).", code="MR-invalid-argument"
        )
    if named is not None and not (named and takes in ("named", "named or all")):
        raise ConfigurationError(f"A {purpose} is not one of certain inboxes: name none.", code="MR-invalid-argument")
    if staging is not None and not PURPOSES[purpose].creates:
        raise ConfigurationError(f"A {purpose} has no staging schema: name none.", code="MR-invalid-argument")
    return _Call(
        purpose, _role_name(role), named, None if staging is None else schema_name(staging), schema_name(schema)
    )


def _role_name(role: str) -> str:
    if not isinstance(role, str) or not 1 <= len(utf8(role, "role's name")) <= MAX_ROLE_BYTES:
        raise InvalidName(f"Role name {shown(role)} is not valid: it has 1 to {MAX_ROLE_BYTES} bytes.")
    # Also quoted, the server takes this name for everybody.
    if role.lower() == "public":
        raise ConfigurationError(
            "Rights for PUBLIC would be everybody's. Create a role, and grant it to those who may.",
            code="MR-role-unfit",
        )
    return role


# Creating an inbox takes this lock too. And two sessions that change the rights on one object at once would
# fail, one of them with "tuple concurrently updated".
RIGHTS_LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))
ROLE = Sql(
    """
SELECT r.oid = (SELECT relowner FROM pg_catalog.pg_class WHERE oid = '{schema}.node'::regclass::oid)
FROM pg_catalog.pg_roles AS r WHERE r.rolname = %(role)s::text::name
""",
    columns=("boolean",),
)
INBOXES = Sql(
    """
SELECT name, {is_bounded}, log FROM {schema}.inbox_registry
WHERE to_regclass('{schema}.inbox_' || name) IS NOT NULL ORDER BY name
""",
    columns=("text", "boolean", "text"),
    is_bounded=IS_BOUNDED,
)
# What was granted to the role itself: not what it has as a member of another one, or because it is everybody's.
# D-roles-4: What a role has been granted is read from the catalog.
HELD = Sql(
    """
WITH me AS (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = %(role)s::text::name)
SELECT 'schema', n.nspname::text, a.privilege_type, NULL::text
FROM me, pg_catalog.pg_namespace AS n, LATERAL aclexplode(n.nspacl) AS a
WHERE n.nspname = '{named}'::name AND a.grantee = me.oid
UNION ALL
SELECT CASE WHEN c.relkind = 'S' THEN 'sequence' ELSE 'table' END, c.relname::text, a.privilege_type, NULL
FROM me, pg_catalog.pg_class AS c, LATERAL aclexplode(c.relacl) AS a
WHERE c.relnamespace = '{schema}'::regnamespace::oid AND a.grantee = me.oid
UNION ALL
SELECT 'table', c.relname::text, a.privilege_type, t.attname::text
FROM me, pg_catalog.pg_class AS c
JOIN pg_catalog.pg_attribute AS t ON t.attrelid = c.oid, LATERAL aclexplode(t.attacl) AS a
WHERE c.relnamespace = '{schema}'::regnamespace::oid AND a.grantee = me.oid
UNION ALL
SELECT 'function', p.proname::text, a.privilege_type, NULL
FROM me, pg_catalog.pg_proc AS p, LATERAL aclexplode(p.proacl) AS a
WHERE p.pronamespace = '{schema}'::regnamespace::oid AND a.grantee = me.oid
""",
    columns=("text", "text", "text", "text"),
)


def _granting(call: _Call, actor: str, why: str | None, *, dry_run: bool) -> Operation[RightsChange]:
    inboxes, _ = yield from _reading(call, role_may_be_missing=dry_run)
    statements = grants(call.schema, call.role, _needed(call, inboxes))
    change = RightsChange(tuple(statements), tuple(each.name for each in inboxes))
    yield from _changing("grant", call, change, actor, why, dry_run)
    return change


def _revoking(call: _Call, actor: str, why: str | None, *, dry_run: bool) -> Operation[RightsChange]:
    inboxes, others = yield from _reading(call)
    rows = yield HELD.at(schema=call.schema, named=call.schema)(role=call.role)
    held = frozenset(Atom(Thing(kind, name), privilege, column) for kind, name, privilege, column in rows)
    revoked = _needed(call, inboxes)
    kept = _kept(call, revoked, held, inboxes, others)
    needed = frozenset[Atom]().union(*kept.values())
    taken = {atom for atom in revoked if not covered(atom, needed)}
    # To revoke a privilege on a table revokes it on each of its columns.
    whole = {(atom.thing, atom.privilege) for atom in taken if atom.column is None}
    again = {atom for atom in needed if atom.column is not None and (atom.thing, atom.privilege) in whole}
    statements = revokes(call.schema, call.role, taken) + grants(call.schema, call.role, again)
    change = RightsChange(tuple(statements), tuple(each.name for each in inboxes), tuple(_whole(kept)))
    yield from _changing("revoke", call, change, actor, why, dry_run)
    return change


def _reading(
    call: _Call, *, role_may_be_missing: bool = False
) -> Operation[tuple[list[GrantedInbox], list[GrantedInbox]]]:
    """Lock the inboxes and rights of the node; return the inboxes that the call is for, and all."""
    yield IN_TRANSACTION
    yield from checking(call.schema)
    yield RIGHTS_LOCK.at(lock=str(locks.DDL), node=call.schema)()
    found = yield ROLE.at(schema=call.schema)(role=call.role)
    if not found and not role_may_be_missing:
        raise ConfigurationError(
            f"There is no role {shown(call.role)} on this server. Create it first: CREATE ROLE ... LOGIN",
            code="MR-no-such-role",
        )
    if found == [(True,)]:
        raise ConfigurationError(
            f"Role {shown(call.role)} owns the schema, and has all rights. Name the role of a program.",
            code="MR-role-unfit",
        )
    every = {row[0]: GrantedInbox(*row) for row in (yield INBOXES.at(schema=call.schema)())}
    takes_none = PURPOSES[call.purpose].inboxes == "none"
    named = call.named if call.named is not None else () if takes_none else tuple(every)
    if missing := [name for name in named if name not in every]:
        option = "" if call.schema == DEFAULT_SCHEMA else f" --schema {call.schema}"
        raise UnknownInbox(
            f"There is no inbox {missing[0]!r} in schema {call.schema!r}.{meant(missing[0], every)} Create it first: "
            f"mailroom inbox create {missing[0]}{option}"
        )
    return [every[name] for name in named], list(every.values())


def _needed(call: _Call, inboxes: list[GrantedInbox]) -> Atoms:
    """Return what the call is about."""
    of_inboxes = (inbox_atoms(call.purpose, inbox) for inbox in inboxes)
    return frozenset(schema_atoms(call.schema, call.purpose, call.staging)).union(
        fixed_atoms(call.purpose), *of_inboxes
    )


def _kept(
    call: _Call, revoked: Atoms, held: Atoms, inboxes: list[GrantedInbox], every: list[GrantedInbox]
) -> dict[str, Atoms]:
    """Return what the role needs for each other purpose that it has all rights for.

    One that the revoked rights are enough for is no other purpose: nothing tells whether it was ever granted.
    """
    kept = {}
    for purpose, about in PURPOSES.items():
        fixed = fixed_atoms(purpose)
        if not all(covered(atom, held) for atom in fixed):
            continue
        mine = [
            of for inbox in every if purpose != call.purpose or inbox not in inboxes
            if (of := inbox_atoms(purpose, inbox)) and all(covered(atom, held) for atom in of)
        ]  # fmt: skip
        if not mine and (purpose == call.purpose or about.inboxes in ("named", "named or all")):
            continue
        needed = fixed.union(*mine)
        if not all(covered(atom, revoked) for atom in needed):
            schemas = frozenset(schema_atoms(call.schema, purpose, None))
            kept[purpose] = needed | {atom for atom in schemas if atom in held}
    return kept


def _whole(kept: dict[str, Atoms]) -> list[str]:
    """Return the purposes that are no part of another one."""
    return [
        purpose for purpose, needed in kept.items()
        if not any(
            other != purpose and all(covered(atom, of_other) for atom in needed) for other, of_other in kept.items()
        )
    ]  # fmt: skip


def _changing(
    action: str, call: _Call, change: RightsChange, actor: str, why: str | None, dry_run: bool
) -> Operation[None]:
    if dry_run:
        return
    for statement in change.statements:
        yield Statement(statement.replace("%", "%%"), ())()
    about: list[tuple[str | None, str | None, int]] = [(name, None, 0) for name in change.inboxes] or [(None, None, 0)]
    act, way = (acts.GRANT, "to") if action == "grant" else (acts.REVOKE, "from")
    yield from auditing(call.schema, act, about, actor, why, f"{call.purpose} {way} {call.role}")
