"""What the server has gathered of columns is, in Arrow, what they had, value by value."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from mailroom.message.message import COLUMNS
from spark_jobs.arrow.gathered import arrays, gathered, sent
from spark_jobs.arrow.message_rows import ROW_COLUMNS
from tests.support.node import Node

ID, NIL = UUID("fc6cbe26-f7b5-5130-a092-c771f88282db"), UUID(int=0)
FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, 999_999, UTC)
# Of each type what it has at its edges, and a null where a message may have one.
VALUES: dict[str, list[Any]] = {
    "key": ["", "Zoë", "x" * 200, "a\nb\\c'\"", "é", "6"],
    "clock": [1, 2**63 - 1, -(2**63), 0, 255, 256],
    "message_id": [ID, NIL, UUID(int=2**128 - 1), ID, NIL, ID],
    "kind": list("MECRME"),
    "event_type": [None, "C", "U", None, "D", None],
    "value": [b"", None, b"\0", bytes(range(256)), None, b"\xff"],
    "value_json": [None, '{"n": 1.50}', None, '"é"', "null", '""'],
    "headers": [None, "{}", '{"user": "Zoë", "tenant": "a, \\"b\\""}', None, '{"a": ""}', None],
    "source": [None] * 6,
    "sent_at": [FIRST, LAST, datetime(1999, 12, 31, 23, 59, 59, 999_999, UTC), FIRST, LAST, FIRST],
    "expires_at": [None, LAST, None, FIRST, datetime(2000, 1, 1, tzinfo=UTC), None],
}


@pytest.fixture(params=["UTF8", "LATIN1"])
def session(request: pytest.FixtureRequest, node: Node) -> Iterator[psycopg.Connection[Any]]:
    """A session of a database of this encoding, whose client has UTF-8."""
    name = f"of_{request.param.lower()}"
    with psycopg.connect(node.dsn, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{request.param}' LOCALE 'C'".encode())
        try:
            with psycopg.connect(make_conninfo(node.dsn, dbname=name, client_encoding="UTF8")) as connection:
                yield connection
        finally:
            server.execute(f"DROP DATABASE {name} (FORCE)".encode())


@pytest.mark.parametrize("first", [0, 1, 5])
def test_what_is_gathered_is_what_was_there(session: psycopg.Connection[Any], first: int) -> None:
    there = {name: values[first:] for name, values in VALUES.items()}
    count = len(there["key"])
    given = ", ".join(
        f"%s::{'timestamptz[]' if kind == 'timestamp' else f'{kind}[]'}" for kind in map(COLUMNS.__getitem__, there)
    )
    named = ", ".join(sent(name, f"{name} AT TIME ZONE 'UTC'" if name.endswith("_at") else name) for name in there)
    pieces = ", ".join(piece for piece, _ in gathered(there))
    query = f"SELECT {pieces} FROM (SELECT {named} FROM unnest({given}) AS u ({', '.join(there)}) OFFSET 0) AS s"
    row = session.execute(query.encode(), list(there.values()), binary=True).fetchone()
    assert row is not None
    assert [type(piece) in (bytes, str, type(None)) for piece in row] == [True] * len(row)
    for name, array in zip(there, arrays(there, count, row), strict=True):
        array.validate(full=True)
        assert array.type == ROW_COLUMNS.field(name).type, name
        assert array.to_pylist() == [_in_arrow(name, value) for value in there[name]], name
    assert pa.RecordBatch.from_arrays([*arrays(there, count, row)], names=list(there)).num_rows == count


def _in_arrow(name: str, value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if name == "headers" and value is not None:
        return {"{}": [], '{"a": ""}': [("a", "")]}.get(value, [("user", "Zoë"), ("tenant", 'a, "b"')])
    return value
