"""Fold: compute the result of many operations per key, as if applied one after another. No database access.

The operations and their meaning are those of CockroachDB's design of executable messages: put with compare-and-set,
increment, delete, and accounting for every successive prefix of a key.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias
from uuid import UUID

from mailroom.values.numbers import MAX_INT64, MIN_INT64

Raw: TypeAlias = bytes  # for classes with a field named bytes


class Taken(NamedTuple):
    """An executable as read from its outbox: its columns, with arguments and headers as JSON text."""

    position: int
    message_id: UUID
    version: int
    operation: str
    target: str
    key: str
    end_key: str | None
    value: Raw | None
    amount: int | None
    bytes: int | None
    expected: Raw | None
    arguments: str | None
    at: datetime | None
    row_limit: int | None
    notify: str | None
    headers: str | None
    after_clock: int | None
    source: str | None
    sent_at: datetime
    fault: str | None  # the rule in `rules.RULES` that it breaks, if any


class KeyContent(NamedTuple):
    """What a key holds: a value, a number, or in a user's table both. A key without content is absent."""

    value: bytes | None
    number: int | None


Contents: TypeAlias = dict[str, KeyContent | None]


# D-execute-1: Rows of executables pass through Python.
class OperationRefused(Exception):
    """The operation cannot be applied, and changed nothing; the text says why."""


class CompareFailed(OperationRefused):
    """The key does not hold what `put` expects."""

    def __init__(self, found: KeyContent | None) -> None:
        super().__init__("the key does not hold the expected value" if found else "the key does not exist")
        self.found = None if found is None else found.number if found.value is None else found.value


@dataclass(frozen=True, slots=True)
class Rules:
    """What a target can hold. In the store a key has a value or a number; elsewhere each has a column of its own."""

    has_value: bool = True
    has_number: bool = True
    smallest: int = MIN_INT64
    largest: int = MAX_INT64
    text: bool = False
    exclusive: bool = False


STORE_RULES = Rules(exclusive=True)


def applied(operation: Taken, content: KeyContent | None, rules: Rules) -> KeyContent | None:
    """Return what the key holds after the operation: a put, an increment or a delete. Raises `OperationRefused`."""
    match operation.operation:
        case "increment":
            return _incremented(content, operation.amount or 0, rules)
        case "put":
            _compare(operation.expected, content)
            return _put(content, operation.value or b"", rules)
        case "delete":
            return None
        case _:
            raise OperationRefused("the operation is not known")


def _incremented(content: KeyContent | None, amount: int, rules: Rules) -> KeyContent:
    if not rules.has_number:
        raise OperationRefused("the target has no number column")
    value, number = content or (None, 0)
    if rules.exclusive and value is not None:
        raise OperationRefused("the key holds a value, not a number")
    total = (number or 0) + amount
    if not rules.smallest <= total <= rules.largest:
        raise OperationRefused(f"the number would leave its range, {rules.smallest} to {rules.largest}")
    return KeyContent(value, total)


def _compare(expected: bytes | None, content: KeyContent | None) -> None:
    if expected is None:
        return
    # Empty bytes expect an absent key. So an empty value can be put, but never expected.
    if content is not None if expected == b"" else content is None or content.value != expected:
        raise CompareFailed(content)


def _put(content: KeyContent | None, value: bytes, rules: Rules) -> KeyContent:
    if not rules.has_value:
        raise OperationRefused("the target has no value column")
    if rules.text:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            raise OperationRefused("the value is not UTF-8, and the column is text") from None
        if "\0" in text:
            raise OperationRefused("the value holds a NUL character, and the column is text")
    if rules.exclusive or not rules.has_number:
        return KeyContent(value, None)
    return KeyContent(value, 0 if content is None else content.number)  # the column may be NOT NULL: start at 0


class Book(NamedTuple):
    """A row of `accounting`: a prefix and a minute."""

    key: str
    minute: datetime


class Sums(NamedTuple):
    """The sums of a book: how many entries, and how many bytes."""

    entries: int
    bytes: int


Books: TypeAlias = dict[Book, Sums]


def prefixes(key: str) -> Iterator[str]:
    """Yield every successive prefix of a key, for a/b/c: a, a/b and a/b/c. None is empty."""
    cut = key.find("/")
    while cut >= 0:
        if cut:
            yield key[:cut]
        cut = key.find("/", cut + 1)
    yield key


def books_of(operation: Taken) -> list[Book]:
    """Return the books that an account operation adds to."""
    # In UTC: historical time zones have offsets with seconds.
    minute = (operation.at or operation.sent_at).astimezone(UTC).replace(second=0, microsecond=0)
    return [Book(prefix, minute) for prefix in prefixes(operation.key)]


def entered(operation: Taken, keys: Iterable[Book], books: Books) -> None:
    """Add an account operation to all of its books, or to none and raise `OperationRefused`."""
    count, size = operation.amount or 0, operation.bytes or 0
    found = {book: books.get(book, Sums(0, 0)) for book in keys}
    sums = {book: Sums(before.entries + count, before.bytes + size) for book, before in found.items()}
    for each in sums.values():
        if not (MIN_INT64 <= each.entries <= MAX_INT64 and MIN_INT64 <= each.bytes <= MAX_INT64):
            raise OperationRefused(f"a sum would leave its range, {MIN_INT64} to {MAX_INT64}")
    books.update(sums)
