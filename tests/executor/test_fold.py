"""Fold: the result of operations, rule by rule, equals that of one after another."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.executor.batch.fold import (
    STORE_RULES,
    Book,
    Books,
    CompareFailed,
    Contents,
    KeyContent,
    OperationRefused,
    Rules,
    Sums,
    Taken,
    applied,
    books_of,
    entered,
    prefixes,
)
from mailroom.values.numbers import MAX_INT64, MIN_INT64
from outbox import Executable
from tests.support.executing import Model, Things

NOON = datetime(2026, 7, 1, 12, 0, 59, 999_999, tzinfo=UTC)
MINUTE = datetime(2026, 7, 1, 12, 0, tzinfo=UTC)
BOTH = Rules()
SMALL = Rules(smallest=-(2**15), largest=2**15 - 1, text=True)
OF_TARGETS = {"store": STORE_RULES, "things": SMALL}


def taken(operation: str, key: str = "k", **fields: Any) -> Taken:
    """An executable with the parts that matter."""
    empty = dict.fromkeys(Taken._fields)
    known = {"position": 1, "message_id": uuid4(), "version": 1, "target": "store", "sent_at": NOON}
    return Taken(**{**empty, **known, "operation": operation, "key": key, **fields})


def put(value: bytes, **fields: Any) -> Taken:
    return taken("put", value=value, **fields)


def increment(by: int) -> Taken:
    return taken("increment", amount=by)


DELETE = taken("delete")


# -- Values and counters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [None, KeyContent(b"old", None), KeyContent(None, 5)])
def test_put_sets_the_value_and_delete_leaves_nothing_whatever_was_there(held: KeyContent | None) -> None:
    assert applied(put(b"new"), held, STORE_RULES) == KeyContent(b"new", None)
    assert applied(DELETE, held, STORE_RULES) is None


def test_value_of_no_bytes_is_a_value() -> None:
    assert applied(put(b""), None, STORE_RULES) == KeyContent(b"", None)
    with pytest.raises(OperationRefused, match="a value, not a number"):
        applied(increment(1), KeyContent(b"", None), STORE_RULES)


def test_counter_begins_at_0_and_counts_in_both_directions() -> None:
    assert applied(increment(3), None, STORE_RULES) == KeyContent(None, 3)
    assert applied(increment(-5), KeyContent(None, 3), STORE_RULES) == KeyContent(None, -2)
    assert applied(increment(0), None, STORE_RULES) == KeyContent(None, 0)


def test_number_never_leaves_its_range() -> None:
    for held, by, rules in (
        (MAX_INT64, 1, STORE_RULES),
        (MIN_INT64, -1, STORE_RULES),
        (MAX_INT64, MAX_INT64, STORE_RULES),
        (MIN_INT64, MIN_INT64, STORE_RULES),
        (2**15 - 1, 1, SMALL),
        (-(2**15), -1, SMALL),
        (0, MAX_INT64, SMALL),
    ):
        with pytest.raises(OperationRefused, match="would leave its range"):
            applied(increment(by), KeyContent(None, held), rules)


def test_number_reaches_both_ends_of_its_range() -> None:
    for held, by in ((MAX_INT64 - 1, 1), (MIN_INT64 + 1, -1), (MIN_INT64, MAX_INT64)):
        assert applied(increment(by), KeyContent(None, held), STORE_RULES) == KeyContent(None, held + by)


def test_counter_of_the_store_becomes_a_value_and_no_value_a_counter() -> None:
    assert applied(put(b"v"), KeyContent(None, 7), STORE_RULES) == KeyContent(b"v", None)
    with pytest.raises(OperationRefused, match="a value, not a number"):
        applied(increment(1), KeyContent(b"v", None), STORE_RULES)


def test_row_of_a_user_has_a_value_and_a_number() -> None:
    assert applied(put(b"v"), KeyContent(None, 7), BOTH) == KeyContent(b"v", 7)
    assert applied(increment(1), KeyContent(b"v", None), BOTH) == KeyContent(b"v", 1)
    assert applied(increment(1), KeyContent(b"v", 7), BOTH) == KeyContent(b"v", 8)
    assert applied(put(b"v"), KeyContent(b"w", None), BOTH) == KeyContent(b"v", None)


def test_counter_of_a_row_that_a_put_makes_begins_at_0() -> None:
    assert applied(put(b"v"), None, BOTH) == KeyContent(b"v", 0)
    assert applied(put(b"v"), None, Rules(has_number=False)) == KeyContent(b"v", None)
    assert applied(put(b"v"), None, STORE_RULES) == KeyContent(b"v", None)


def test_column_that_is_not_registered_is_not_written() -> None:
    with pytest.raises(OperationRefused, match="no value column"):
        applied(put(b"v"), None, Rules(has_value=False))
    with pytest.raises(OperationRefused, match="no number column"):
        applied(increment(1), None, Rules(has_number=False))


@pytest.mark.parametrize(("value", "reason"), [(b"\xff", "not UTF-8"), (b"a\0b", "NUL")])
def test_column_of_text_takes_text(value: bytes, reason: str) -> None:
    with pytest.raises(OperationRefused, match=reason):
        applied(put(value), None, SMALL)
    assert applied(put(value), None, BOTH) == KeyContent(value, 0)
    assert applied(put("ü".encode()), None, SMALL) == KeyContent("ü".encode(), 0)


# -- Compare and set --------------------------------------------------------------------------------------------------


def test_put_whose_expectation_holds_is_applied() -> None:
    for held, expected in (
        (None, None),
        (KeyContent(b"v", None), None),
        (KeyContent(None, 5), None),
        (None, b""),
        (KeyContent(b"v", None), b"v"),
    ):
        assert applied(put(b"new", expected=expected), held, STORE_RULES) == KeyContent(b"new", None)


def test_put_whose_expectation_fails_says_what_it_found() -> None:
    for held, expected, found in (
        (None, b"v", None),
        (KeyContent(b"v", None), b"", b"v"),
        (KeyContent(None, 0), b"", 0),
        (KeyContent(b"", None), b"", b""),
        (KeyContent(b"w", None), b"v", b"w"),
        (KeyContent(None, 5), b"5", 5),
    ):
        with pytest.raises(CompareFailed) as failed:
            applied(put(b"new", expected=expected), held, STORE_RULES)
        assert failed.value.found == found


# -- Books ------------------------------------------------------------------------------------------------------------


def test_prefixes_are_cut_at_each_slash_and_never_empty() -> None:
    for key, found in (
        ("a", ["a"]),
        ("a/b/c", ["a", "a/b", "a/b/c"]),
        ("/a", ["/a"]),
        ("a/", ["a", "a/"]),
        ("a//b", ["a", "a/", "a//b"]),
        ("/", ["/"]),
        ("//", ["/", "//"]),
    ):
        assert list(prefixes(key)) == found


def test_books_are_by_the_minute_of_at_else_of_the_send() -> None:
    at = NOON.replace(minute=7, second=1).astimezone(timezone(timedelta(hours=5, minutes=30, seconds=17)))
    operation = taken("account", "a/b", amount=1, bytes=2)
    assert books_of(operation) == [Book("a", MINUTE), Book("a/b", MINUTE)]
    assert {book.minute for book in books_of(operation._replace(at=at))} == {MINUTE.replace(minute=7)}


def test_entry_goes_into_all_of_its_books() -> None:
    books: Books = {Book("a", MINUTE): Sums(10, 100)}
    operation = taken("account", "a/b", amount=1, bytes=-20)
    entered(operation, books_of(operation), books)
    assert books == {Book("a", MINUTE): Sums(11, 80), Book("a/b", MINUTE): Sums(1, -20)}


def test_entry_that_overflows_one_book_goes_into_none() -> None:
    for sums, amount, size in (
        (Sums(MAX_INT64, 0), 1, 0),
        (Sums(MIN_INT64, 0), -1, 0),
        (Sums(0, MAX_INT64), 0, 1),
        (Sums(0, MIN_INT64), 0, -1),
    ):
        books: Books = {Book("a", MINUTE): sums}
        operation = taken("account", "a/b", amount=amount, bytes=size)
        with pytest.raises(OperationRefused, match="would leave its range"):
            entered(operation, books_of(operation), books)
        assert books == {Book("a", MINUTE): sums}


# -- One after another ------------------------------------------------------------------------------------------------

EDGES = st.sampled_from([0, 1, -1, 2**15 - 1, -(2**15), MAX_INT64, MIN_INT64])
VALUES = st.sampled_from([b"", b"v", b"w", b"5", b"\xff", b"\0"])
KEYS = st.sampled_from(["1", "2"])
PLACES = st.sampled_from(["store", "things"])
OPERATIONS = st.one_of(
    st.builds(Executable, st.just("put"), KEYS, PLACES, value=VALUES, expected=st.none() | VALUES),
    st.builds(Executable, st.just("increment"), KEYS, PLACES, amount=EDGES),
    st.builds(Executable, st.just("delete"), KEYS, PLACES),
)


at_any_pace = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@at_any_pace
@given(st.lists(OPERATIONS, max_size=40))
def test_folded_is_what_one_after_another_comes_to(operations: list[Executable]) -> None:
    operations = [replace(each, id=UUID(int=nth)) for nth, each in enumerate(operations)]
    model, dead = Model(Things()), []
    model.apply(operations)
    contents: dict[str, Contents] = {"store": {"1": None, "2": None}, "things": {"1": None, "2": None}}
    for each in operations:
        held = contents[str(each.target)]
        parts = {"value": each.value, "expected": each.expected, "amount": each.amount}
        try:
            operation = taken(each.operation, str(each.key), target=each.target, **parts)
            held[str(each.key)] = applied(operation, held[str(each.key)], OF_TARGETS[str(each.target)])
        except OperationRefused as refused:
            dead.append((each.id, str(refused)))
    of_store = {key: content for key, content in contents["store"].items() if content is not None}
    assert {key: content.number if content.value is None else content.value for key, content in of_store.items()} == (
        model.store
    )
    of_things = {int(key): content for key, content in contents["things"].items() if content is not None}
    assert model.things is not None
    # A row begun by a put has the number 0 in the table, and none until it is written.
    assert {key: [content.value, content.number or 0] for key, content in of_things.items()} == {
        key: [None if body is None else body.encode(), total] for key, (body, total) in model.things.rows.items()
    }
    assert dead == model.dead


@at_any_pace
@given(st.lists(st.tuples(st.sampled_from(["a", "a/b", "a/c", "d"]), EDGES, EDGES), max_size=30))
def test_entered_is_what_one_after_another_comes_to(entries: list[tuple[str, int, int]]) -> None:
    model, books, dead = Model(), Books(), 0
    for key, amount, size in entries:
        operation = taken("account", key, amount=amount, bytes=size)
        model.apply([Executable("account", key, "accounting", amount=amount, bytes=size, at=NOON, id=uuid4())])
        try:
            entered(operation, books_of(operation), books)
        except OperationRefused:
            dead += 1
    assert {(book.key, book.minute): tuple(sums) for book, sums in books.items()} == model.books
    assert dead == len(model.dead)
