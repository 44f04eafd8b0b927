"""The dead letter of an executable that cannot be applied, and the reason it gives."""

from collections.abc import Sequence

import psycopg

from dispatcher.executor.batch.fold import Taken
from mailroom.message.columns import MESSAGE_PARTS, listed
from mailroom.message.executable import NAMES as PARTS
from mailroom.message.executable import wired
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sqlstate import BLAMES, NO_STATEMENT, meaning, sqlstate

DEAD_LETTER = Sql(
    """
INSERT INTO {schema}.dead_letter (stage, reason, message_id, topic, key, kind, message_type, value, {kept})
SELECT 'execute', reason, message_id, topic, key, 'M', 'U', value, {taken}
FROM unnest(%(reason)s::text[], %(message_id)s::uuid[], %(topic)s::text[], %(key)s::text[], %(value)s::bytea[], {given})
     WITH ORDINALITY AS d (reason, message_id, topic, key, value, {kept}, nth)
ORDER BY nth
""",
    kept=listed(MESSAGE_PARTS),
    taken=", ".join(part.taken() for part in MESSAGE_PARTS),
    given=", ".join(f"%({part.name})s::{part.plain}[]" for part in MESSAGE_PARTS),
)


def dead_lettering_executables(schema: str, dead: Sequence[tuple[Taken, str]]) -> Operation[None]:
    """Insert executables that could not be applied into `dead_letter`, each with its reason."""
    if not dead:
        return
    taken = [each for each, _ in dead]
    yield DEAD_LETTER.at(schema=schema)(
        reason=[reason for _, reason in dead],
        message_id=[each.message_id for each in taken],
        topic=[f"{each.target}.{each.operation}" for each in taken],
        key=[each.key or str(each.message_id) for each in taken],
        value=[wired({name: getattr(each, name) for name in PARTS}) for each in taken],
        **{part.name: [getattr(each, part.name) for each in taken] for part in MESSAGE_PARTS},
    )


def reason_of(error: Exception) -> str | None:
    """Return why an executable failed, without any of its content; None if the executable is not to blame."""
    # `BLAMES` includes XX000, which extensions raise for bad input, and 55000, such as a sequence not used yet.
    # An executor that misses a statement of its own gets `StatementsGone` instead.
    is_its_own = meaning(error) in BLAMES or sqlstate(error) == NO_STATEMENT
    return described(error) if sqlstate(error) and is_its_own else None


def described(error: Exception) -> str:
    """Describe an error of the database without any of the executable's content."""
    code = sqlstate(error)
    if not isinstance(error, psycopg.Error):
        error = getattr(error, "orig", error)
    diag = getattr(error, "diag", None)
    names = (diag.constraint_name, diag.table_name, diag.column_name) if diag is not None else ()
    # An error's text may repeat values. That of RAISE was written by the author of the function.
    raised = diag.message_primary if diag is not None and code == "P0001" else None
    return " ".join(part for part in (f"{type(error).__name__} ({code})", *names, raised) if part)
