"""Messages from a CSV file, read row by row: the file may be larger than memory."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any

from mailroom.errors import ConfigurationError, InvalidMessage
from mailroom.message.outgoing import Outgoing, row_of
from mailroom.sql.operation import Row
from mailroom.values.names import MAX_VALUE_BYTES, shown


class CsvSource:
    """A CSV file with a heading, one message per row. The value of a message is a map of column name to text.

    `lines` is the text file, opened with newline="" and errors="surrogateescape". `key_column` names the column that
    holds the key; a row where it is empty is unordered. `columns` are the columns that go into the value, all if empty.
    `fields` are the other fields of every message, with the names of `Outgoing`. Raises `ConfigurationError` for a
    column that is not in the heading, and `InvalidMessage` for a bad heading.
    """

    def __init__(
        self,
        lines: IO[str],
        topic: str,
        key_column: str | None = None,
        columns: Sequence[str] = (),
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        csv.field_size_limit(MAX_VALUE_BYTES)
        self._reader = csv.reader(lines, strict=True)
        self._topic = topic
        self._fields = fields
        heading = self._heading()
        for name in (*columns, *([] if key_column is None else [key_column])):
            if name not in heading:
                raise ConfigurationError(
                    f"The file has no column {shown(name)}; it has {', '.join(map(shown, heading))}.",
                    code="MR-invalid-csv",
                )
        self._key_at = None if key_column is None else heading.index(key_column)
        self._columns = [(name, heading.index(name)) for name in columns or heading]
        self._width = len(heading)

    def rows(self) -> Iterator[Row]:
        """Yield the messages as rows for the outbox. Raises `InvalidMessage`, which names the bad row and its line.

        Row 1 is the first one below the heading; blank lines do not count as rows.
        """
        number = 0
        try:
            for cells in self._reader:
                if cells:
                    number += 1
                    yield row_of(self._message(cells))
        except InvalidMessage as error:
            text = f"Row {number} (line {self._reader.line_num}): {error} Nothing was sent."
            raise type(error)(text, code=error.code) from None
        except csv.Error as error:
            raise InvalidMessage(
                f"Row {number + 1} (line {self._reader.line_num}): {error}. Nothing was sent: correct it first.",
                code="MR-invalid-csv",
            ) from None

    def _message(self, cells: list[str]) -> Outgoing:
        if len(cells) != self._width:
            raise InvalidMessage(f"it has {len(cells)} cells, the heading has {self._width}.", code="MR-invalid-csv")
        _check_text(cells)
        key = None if self._key_at is None else cells[self._key_at] or None
        return Outgoing(self._topic, {name: cells[at] for name, at in self._columns}, key, **self._fields)

    def _heading(self) -> list[str]:
        try:
            heading = next(self._reader, [])
        except csv.Error as error:
            raise InvalidMessage(f"The heading cannot be read: {error}.", code="MR-invalid-csv") from None
        if not heading:
            raise InvalidMessage("The file is empty: its first line must name the columns.", code="MR-invalid-csv")
        _check_text(heading)
        twice = {name for name in heading if heading.count(name) > 1}
        if twice:
            raise InvalidMessage(
                f"The heading names {', '.join(map(shown, sorted(twice)))} more than once.", code="MR-invalid-csv"
            )
        return heading


def _check_text(cells: list[str]) -> None:
    # Bytes that are not UTF-8 were read as surrogates, so that the error can name the row.
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        raise InvalidMessage(
            "it is not UTF-8: convert the file, for instance by iconv.", code="MR-invalid-csv"
        ) from None
