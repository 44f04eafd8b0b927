"""What a column's rows must be; an error names the column and the fault, and never what a row holds."""

import pyarrow as pa
import pyarrow.compute as pc

from mailroom.errors import InvalidMessage

NUL = "\0"


def demand(holds: pa.Array, name: str, fault: str) -> None:
    """Raise `InvalidMessage`, with the fault, unless it holds for every row."""
    if not pc.all(pc.fill_null(holds, False), min_count=0).as_py():
        raise InvalidMessage(f"Column {name} has a row that {fault}. Nothing of this batch was sent.")


def without_nul(text: pa.Array, name: str) -> pa.Array:
    """Return the text of a column, or raise `InvalidMessage`: PostgreSQL's is UTF-8 without NUL."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidMessage(
            f"Column {name} has a row that is not UTF-8: send it as binary, or in the value."
        ) from None
    clean = pc.equal(pc.count_substring(pc.cast(text, pa.large_binary()), NUL.encode()), 0)
    demand(pc.fill_null(clean, True), name, "holds a NUL character, which PostgreSQL's text cannot")
    return text
