"""Guarded tables: their constraints or triggers must see each operation by itself; one trip applies many.

Python predicts each result from what the keys hold, by the rules of the fold. A DO block in the server then applies the
operations one after another, each in a savepoint with statements of its own. It undoes and stops at the first that does
not go as predicted: its row differs, it fails, or a setting is left changed. The caller applies that one by itself.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dispatcher.executor.applying.user_code import WATCHED_SETTINGS
from dispatcher.executor.batch.fold import Contents, KeyContent, OperationRefused, Taken
from dispatcher.executor.batch.results import Results
from dispatcher.executor.targets.target import Target, finding_contents
from mailroom.sql.operation import Operation, Sql

# D-execute-3: Guarded tables: many operations in one trip, one by one in the server.
OPERATIONS = 100  # at most per trip; by then the cost of the trip is small
MAX_BYTES = 1024 * 1024  # of values, which travel as text


@dataclass(frozen=True, slots=True)
class _Step:
    """What one operation finds, how it writes (insert, update, delete, or only a check), and its results."""

    write: str
    key: str | None
    before: KeyContent | None
    after: KeyContent | None
    results: Results

    @property
    def size(self) -> int:
        return sum(len(each.value or b"") for each in (self.before, self.after) if each is not None)


def _predicted(target: Target, taken: Taken, contents: Contents) -> _Step:
    """Return what an operation does if its key holds what `contents` says, and update `contents`."""
    results = Results(1)
    try:
        key = target.key_of(taken.key)
    except OperationRefused as refusal:
        results.refuse(taken, str(refusal))
        return _Step("check", None, None, None, results)
    before = contents[key]
    contents[key], is_applied = results.apply(taken, before, target.rules)
    after = contents[key]
    write = "check" if not is_applied else "delete" if after is None else "insert" if before is None else "update"
    return _Step(write, key, before, after, results)


# A DO block has no parameters and no result, so both are passed as settings of the transaction.
GIVE = Sql(
    "SELECT "
    + ", ".join(
        f"set_config('mailroom.{name}', %({name})s::{kind}::text, true)"
        for name, kind in (
            ("left_s", "float8"),
            ("writes", "text[]"),
            ("keys", "text[]"),
            ("are_there", "boolean[]"),
            ("old_values", "bytea[]"),
            ("old_numbers", "bigint[]"),
            ("new_values", "bytea[]"),
            ("new_numbers", "bigint[]"),
        )
    ),
    columns=("text",) * 8,
)
WATCHED = " || ' ' || ".join(WATCHED_SETTINGS)
AS_PREDICTED = "({found_value}) IS NOT DISTINCT FROM g.old_value AND {found_number} IS NOT DISTINCT FROM g.old_number"
BLOCK = f"""
#variable_conflict use_column
DECLARE
    g record;
    deadline timestamptz := clock_timestamp() + current_setting('mailroom.left_s')::float8 * interval '1 second';
    watched text := {WATCHED};
    touched bigint;
    applied bigint := 0;
BEGIN
    FOR g IN
        SELECT * FROM unnest(
            current_setting('mailroom.writes')::text[], current_setting('mailroom.keys')::text[],
            current_setting('mailroom.are_there')::boolean[], current_setting('mailroom.old_values')::bytea[],
            current_setting('mailroom.old_numbers')::bigint[], current_setting('mailroom.new_values')::bytea[],
            current_setting('mailroom.new_numbers')::bigint[]
        ) AS s (write, key, is_there, old_value, old_number, value, number)
    LOOP
        EXIT WHEN applied > 0 AND clock_timestamp() >= deadline;
        BEGIN
            CASE g.write
            WHEN 'insert' THEN
                INSERT INTO {{target}} ({{key}}, {{columns}}) VALUES (g.key::{{key_type}}, {{given}})
                ON CONFLICT ({{key}}) DO NOTHING;
            WHEN 'update' THEN
                UPDATE {{target}} AS t SET {{sets}} WHERE t.{{key}} = g.key::{{key_type}} AND {AS_PREDICTED};
            WHEN 'delete' THEN
                DELETE FROM {{target}} AS t WHERE t.{{key}} = g.key::{{key_type}};
            ELSE
                PERFORM FROM {{target}} AS t
                WHERE t.{{key}} = g.key::{{key_type}} AND (NOT g.is_there OR {AS_PREDICTED});
            END CASE;
            GET DIAGNOSTICS touched = ROW_COUNT;
            SET CONSTRAINTS ALL IMMEDIATE;
            IF touched <> (g.is_there OR g.write = 'insert')::integer OR {WATCHED} <> watched THEN
                RAISE EXCEPTION USING ERRCODE = 'MR000';
            END IF;
        EXCEPTION WHEN OTHERS THEN
            EXIT;
        END;
        applied := applied + 1;
    END LOOP;
    PERFORM set_config('mailroom.applied', applied::text, true);
END
"""
# A quoted string, not dollar-quoted: a name may hold dollars. Quotes in the block and in names are doubled.
APPLY = Sql("DO '" + BLOCK.replace("'", "''") + "'")
ANSWER = Sql("SELECT current_setting('mailroom.applied')::bigint", columns=("bigint",))


def applying_in_turn(schema: str, target: Target, group: Sequence[Taken], left_s: float) -> Operation[Results]:
    """Apply operations on one guarded table until one does not go as predicted, or `left_s` seconds are over.

    `count` of the results says how many were applied, from the first on. Use within a savepoint.
    """
    # Does not wait for locked rows: the operations before them come first.
    keys = set()
    for each in group:
        with suppress(OperationRefused):
            keys.add(target.key_of(each.key))
    contents = yield from finding_contents(schema, target, keys, waits=False)
    steps, size = [], 0
    for each in group:
        step = _predicted(target, each, contents)
        size += step.size
        if size > MAX_BYTES:
            break
        steps.append(step)
    results = Results()
    if not steps:
        return results
    yield GIVE.at()(
        left_s=left_s,
        writes=[step.write for step in steps],
        keys=[step.key for step in steps],
        are_there=[step.before is not None for step in steps],
        old_values=[step.before and step.before.value for step in steps],
        old_numbers=[step.before and step.before.number for step in steps],
        new_values=[step.after and step.after.value for step in steps],
        new_numbers=[step.after and step.after.number for step in steps],
    )
    names = {name: text.replace("'", "''") for name, text in target.names(schema).items()}
    yield APPLY.at(**names)()
    [(count,)] = yield ANSWER.at()()
    for step in steps[:count]:
        results.add(step.results)
    return results
