"""Run the checks, each by itself, so that one that may not look does not keep the others from it."""

from collections.abc import Sequence

from mailroom.doctor import (
    backlog,
    batches,
    leaders,
    locks,
    logs,
    numbering,
    rights,
    sessions,
    settings,
    shape,
    vacuum,
    workers,
)
from mailroom.doctor.causes import WaitCause, caused, reading_causes
from mailroom.doctor.finding import DoctorCheck, Examination, Finding, Found, Limits, finding
from mailroom.doctor.kinds import KINDS
from mailroom.errors import SchemaError
from mailroom.roles.advice import grant_command, is_denied
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.sqlstate import Meaning, meaning, primary_message
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

NOT_SEEN = "M000"
POOLED = "M032"
REVISION = "M034"
CHECKS: tuple[DoctorCheck, ...] = (
    *sessions.CHECKS, *locks.CHECKS, *vacuum.CHECKS, *shape.CHECKS, *numbering.CHECKS, *leaders.CHECKS,
    *workers.CHECKS, *settings.CHECKS, *rights.CHECKS, *backlog.CHECKS, *batches.CHECKS,
    *logs.CHECKS,
)  # fmt: skip

# D-daemon-7: Each check of the doctor is undone to a savepoint.
SAVE = Sql("SAVEPOINT mailroom_doctor")
# What a check has locked is let go at once, and the settings are the caller's again.
UNDO = Sql("ROLLBACK TO SAVEPOINT mailroom_doctor")
RELEASE = Sql("RELEASE SAVEPOINT mailroom_doctor")
# Within a transaction the server's statistics stay as they were at the first look. A shorter limit of the caller's own
# stays.
LOOK = Sql(
    """
SELECT pg_catalog.set_config('transaction_read_only', 'on', true), pg_catalog.set_config('lock_timeout', '100ms', true),
       CASE WHEN pg_catalog.current_setting('statement_timeout')::interval NOT BETWEEN '1 ms' AND '10 s'
            THEN pg_catalog.set_config('statement_timeout', '10s', true) END,
       pg_catalog.set_config('row_security', 'off', true),
       pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('jit', 'off', true), pg_catalog.pg_stat_clear_snapshot() IS NULL
""",
    columns=("text", "text", "text", "text", "text", "text", "boolean"),
)
NODE = Sql(
    "SELECT current_user::text FROM pg_catalog.pg_class AS c "
    "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
    "WHERE n.nspname = '{node}'::name AND c.relname = 'node'::name",
    columns=("text",),
)
# Sessions whose state the server shows only to their role, to those who have its rights, and to pg_read_all_stats.
UNSEEN = Sql(
    """
SELECT pg_catalog.format('GRANT pg_read_all_stats TO %%I;', current_user),
       pg_catalog.format('%%s sessions of other roles: since when they are in a transaction, and what they do',
           count(*))
FROM pg_stat_activity AS a
WHERE a.usesysid IS NOT NULL AND a.datname = current_database() AND NOT pg_has_role(a.usesysid, 'USAGE')
  AND NOT pg_has_role('pg_read_all_stats'::name, 'USAGE')
HAVING count(*) > 0
""",
    columns=("text", "text"),
)


def examining(*, schema: str = DEFAULT_SCHEMA, limits: Limits | None = None) -> Operation[list[Finding]]:
    """Return what is wrong with the node `schema` now, nothing if it is well.

    `limits` says from which age and number on something counts. It writes nothing, waits for no lock for longer than
    0.1 s, and keeps none on a table: each check is undone to a savepoint. What a check may not see is a finding too,
    M000, with the right to grant. So is a check that a lock keeps from looking; the lock is a finding of its own.

    Ask in a READ COMMITTED transaction. Raises `SchemaError` if there is no such node, and `NotInTransaction` on an
    autocommit connection outside a transaction.
    """
    return _examining(schema_name(schema), limits or Limits())


def _examining(schema: str, limits: Limits) -> Operation[list[Finding]]:
    yield IN_TRANSACTION
    if not (me := (yield NODE.at(node=schema)())):
        option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
        raise SchemaError(
            f"There is no Mailroom schema {schema!r} in this database. Run: mailroom migrate{option}",
            code="MR-no-schema",
        )
    yield SAVE.at()()
    findings: list[Finding] = []
    not_seen: Found = []
    [(role,)] = me
    look = Examination(schema, limits)
    unseen = yield from _looking(DoctorCheck(NOT_SEEN, _unseen, ""), look, role, not_seen)
    not_seen += unseen
    of_other_shape = False
    causes = yield from _causes(limits)
    # The revision first: at another one the tables may be others.
    for check in sorted(CHECKS, key=lambda check: (check.id != REVISION, check.id)):
        if check.of_tables and of_other_shape:
            continue
        if found := (yield from _looking(check, look, role, not_seen)):
            if check.ends:
                found = caused(found, causes, as_commands=check.command == "{first}")
            findings.append(finding(check.id, KINDS[check.id].what, found, check.command, schema))
            of_other_shape |= check.id == REVISION
    yield RELEASE.at()()
    if not_seen:
        findings.append(finding(NOT_SEEN, KINDS[NOT_SEEN].what, not_seen, "{first}", schema))
    return sorted(findings, key=lambda each: each.id)


def telling(schema: str, ids: Sequence[str], limits: Limits) -> Operation[list[tuple[str, Finding]]]:
    """Return what these checks find now, in their order: a finding for each thing, with the command for that one.

    Beside it stands its part, such as the name of the inbox.

    Unlike `examining` it undoes nothing: run it in autocommit. A check that could not look is a finding M000, the last.
    """
    checks = {check.id: check for check in CHECKS}
    findings: list[tuple[str, Finding]] = []
    not_seen: list[tuple[str, Finding]] = []
    look = Examination(schema, limits)
    for check in map(checks.__getitem__, ids):
        try:
            found = yield from check.asking(look)
        except Exception as error:
            if meaning(error) is Meaning.LOST:
                raise
            line = _not_seen(check, error)
            told = finding(NOT_SEEN, KINDS[NOT_SEEN].what, [("", line)], "mailroom doctor", schema)
            not_seen.append(("", told))
            continue
        if found and check.ends:
            causes = yield from reading_causes(limits.lock_s)
            found = caused(found, causes, as_commands=check.command == "{first}")
        what = KINDS[check.id].what
        findings += [(each[0], finding(check.id, what, [each], check.command, schema)) for each in found]
    return findings + not_seen


def _causes(limits: Limits) -> Operation[dict[str, list[WaitCause]]]:
    yield LOOK.at()()
    causes = yield from reading_causes(limits.lock_s)
    yield UNDO.at()()
    return causes


def _unseen(look: Examination) -> Operation[Found]:
    return [(part, line) for part, line in (yield UNSEEN.at()())]


def _looking(check: DoctorCheck, look: Examination, role: str, not_seen: Found) -> Operation[Found]:
    """Return what a check finds; if it may not look, add that to `not_seen`."""
    found: Found = []
    try:
        yield LOOK.at()()
        found = yield from check.asking(look)
    except Exception as error:
        what = meaning(error)
        if what is Meaning.LOST:
            raise
        not_seen.append((_help(error, look.schema, role), _not_seen(check, error)))
    yield UNDO.at()()
    return found


def _not_seen(check: DoctorCheck, error: Exception) -> str:
    return f"{check.id} ({KINDS[check.id].what}): {primary_message(error)}"


def _help(error: Exception, schema: str, role: str) -> str:
    """Return what lets a check look that was refused; nothing where another finding says what is in its way."""
    return grant_command("auditor", role, schema=schema) if is_denied(error) else ""


examine, examine_async = on_connections("examine", examining)
