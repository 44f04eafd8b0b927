"""The sequences of a node, which give its rows their numbers, and its messages their order.

Rows can be copied from one database to another without their sequences: logical replication and a dump of some tables
do that. The sequences then begin again below the rows, and what is sent overtakes what waits, until a number exists
twice. So each sequence that is behind its rows is raised beyond them: by a leader, before it works, and by `mailroom
migrate`. Triggers do it for each row that is copied, before the first send.

The clock is not a sequence in this sense: it is recovered, or jumps, under the dispatch lock (`mailroom.links.start`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mailroom.sql.operation import Operation, Sql

log = logging.getLogger("mailroom")

# D-deliver-5: A copy is recognised by its transaction.
RAISE = Sql('SELECT "table", "column", value FROM {schema}.raise_sequences()', columns=("text", "text", "bigint"))
BEHIND = Sql('SELECT "table", "column", highest FROM {schema}.sequences_behind()', columns=("text", "text", "bigint"))


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a table's column: `value` is the last one, which the sequence has, or which a row has."""

    table: str
    column: str
    value: int


def raising_sequences(schema: str) -> Operation[list[Numbers]]:
    """Raise each sequence that is behind its rows by a million beyond them; return these, with their values now.

    That stays done even if the transaction is undone. There is no wait for it, and if the sequences are right, nothing
    changes.
    """
    return [Numbers(*row) for row in (yield RAISE.at(schema=schema)())]


def finding_behind(schema: str) -> Operation[list[Numbers]]:
    """Return the columns whose sequences are behind their rows, with the highest number of a row."""
    return [Numbers(*row) for row in (yield BEHIND.at(schema=schema)())]


def tell(raised: Sequence[Numbers]) -> None:
    """Log which sequences a leader has raised."""
    for each in raised:
        log.warning(
            "%s.%s was behind its rows, as after a copy without the sequences: it goes on after %d",
            each.table, each.column, each.value,
        )  # fmt: skip
