"""Guarded: operations that their table has to see one by one, many of them in one trip to the server.

What they come to is told beforehand by the same rules as ever, from what their keys hold. A block within the server
then does them one after another, each in a savepoint with statements of its own, as if they had come alone. It stops at
the first for which something is not as foretold: a row that is not what it was to be, an error, a setting that is left.
That one is undone; who asked applies it by itself, and so finds out what it comes to.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dispatcher.executor.fold import Content, Contents, Refused, Taken
from dispatcher.executor.guest import GLANCED
from dispatcher.executor.outcome import Done
from dispatcher.executor.target import Target, finding_contents
from mailroom.sql.operation import Operation, Sql

OPERATIONS = 100  # that one trip does at most: by then the trip costs little
MAX_BYTES = 1024 * 1024  # of values, which travel as text


@dataclass(frozen=True, slots=True)
class _Step:
    """What one operation finds, what it writes (begin, update, delete, or it has but a look), and what it comes to."""

    write: str
    key: str | None
    before: Content | None
    after: Content | None
    done: Done

    @property
    def size(self) -> int:
        return sum(len(each.value or b"") for each in (self.before, self.after) if each is not None)


def _foretold(target: Target, taken: Taken, contents: Contents) -> _Step:
    """Return what an operation comes to if its key holds what `contents` say; and then they say what it holds."""
    done = Done(1)
    try:
        key = target.key_of(taken.key)
    except Refused as refusal:
        done.refuse(taken, str(refusal))
        return _Step("look", None, None, None, done)
    before = contents[key]
    contents[key], is_applied = done.apply(taken, before, target.rules)
    after = contents[key]
    write = "look" if not is_applied else "delete" if after is None else "begin" if before is None else "update"
    return _Step(write, key, before, after, done)


# A block has no parameters and no result, so both are settings of the transaction.
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
GLANCE = " || ' ' || ".join(GLANCED)
AS_FORETOLD = "({found_value}) IS NOT DISTINCT FROM g.old_value AND {found_number} IS NOT DISTINCT FROM g.old_number"
BLOCK = f"""
#variable_conflict use_column
DECLARE
    g record;
    deadline timestamptz := clock_timestamp() + current_setting('mailroom.left_s')::float8 * interval '1 second';
    glance text := {GLANCE};
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
            WHEN 'begin' THEN
                INSERT INTO {{target}} ({{key}}, {{columns}}) VALUES (g.key::{{key_type}}, {{given}})
                ON CONFLICT ({{key}}) DO NOTHING;
            WHEN 'update' THEN
                UPDATE {{target}} AS t SET {{sets}} WHERE t.{{key}} = g.key::{{key_type}} AND {AS_FORETOLD};
            WHEN 'delete' THEN
                DELETE FROM {{target}} AS t WHERE t.{{key}} = g.key::{{key_type}};
            ELSE
                PERFORM FROM {{target}} AS t
                WHERE t.{{key}} = g.key::{{key_type}} AND (NOT g.is_there OR {AS_FORETOLD});
            END CASE;
            GET DIAGNOSTICS touched = ROW_COUNT;
            SET CONSTRAINTS ALL IMMEDIATE;
            IF touched <> (g.is_there OR g.write = 'begin')::integer OR {GLANCE} <> glance THEN
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
# As a string and not between dollars, which a name may hold: quotes in it, and in names, are doubled.
APPLY = Sql("DO '" + BLOCK.replace("'", "''") + "'")
ANSWER = Sql("SELECT current_setting('mailroom.applied')::bigint", columns=("bigint",))


def applying_in_turn(schema: str, target: Target, group: Sequence[Taken], left_s: float) -> Operation[Done]:
    """Apply operations on one guarded table until one of them is not as foretold, or `left_s` seconds are over.

    `count` of what is returned says how many of them, in their order, that was. To be done within a savepoint.
    """
    # Rows that others have locked are waited for by who comes to them.
    keys = set()
    for each in group:
        with suppress(Refused):
            keys.add(target.key_of(each.key))
    contents = yield from finding_contents(schema, target, keys, waits=False)
    steps, size = [], 0
    for each in group:
        step = _foretold(target, each, contents)
        size += step.size
        if size > MAX_BYTES:
            break
        steps.append(step)
    done = Done()
    if not steps:
        return done
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
        done.add(step.done)
    return done
