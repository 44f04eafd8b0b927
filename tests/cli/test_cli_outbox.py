"""`mailroom outbox send`: one message, and CSV files that are sent whole or not at all."""

import json
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest

from inbox import Inbox
from tests.support.command import done, error_of, mailroom
from tests.support.node import Node

ORDERS = ("outbox", "send", "orders")


pytestmark = pytest.mark.inbox("shipping", "orders")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "orders.csv"


def reaped(node: Node) -> list[tuple[str, object]]:
    node.deliver_all()
    lines = done("inbox", "reap", "shipping", "--any", "--limit", "100000", "--json", dsn=node.dsn).splitlines()
    messages = sorted(map(json.loads, lines), key=lambda message: int(message["clock"]))
    return [(message["key"], message["value"]) for message in messages]


def test_one_message_is_sent_and_its_id_printed(node: Node) -> None:
    message_id = done(*ORDERS, "--key", "order-42", "--value", '{"état": [1, 2.5, null]}', dsn=node.dsn).strip()
    assert message_id == str(node.value("SELECT message_id FROM mailroom.outbox"))
    assert reaped(node) == [("order-42", {"état": [1, 2.5, None]})]


def test_message_without_key_is_unordered(node: Node) -> None:
    message_id = done(*ORDERS, "--value", "1", dsn=node.dsn).strip()
    assert reaped(node) == [(message_id, 1)]


def test_csv_is_sent_in_the_order_of_its_rows(node: Node, file: Path) -> None:
    file.write_text('\ufeffid,state\nb,"paid,\nall"\na,sent\n\nb,€\n')
    assert done(*ORDERS, "--csv", str(file), "--key-column", "id", dsn=node.dsn).startswith("3 messages")
    assert reaped(node) == [
        ("b", {"id": "b", "state": "paid,\nall"}),
        ("a", {"id": "a", "state": "sent"}),
        ("b", {"id": "b", "state": "€"}),
    ]


def test_csv_is_read_from_stdin_and_only_the_columns_asked_for_are_sent(node: Node) -> None:
    arguments = ("--csv", "-", "--key-column", "id", "--columns", "c,a")
    printed = done("--json", *ORDERS, *arguments, dsn=node.dsn, stdin=b"id,a,b,c\nk,1,2,3\n")
    assert json.loads(printed) == {"sent": 1, "topic": "orders"}
    assert reaped(node) == [("k", {"c": "3", "a": "1"})]


def test_row_without_key_is_unordered(node: Node) -> None:
    done(*ORDERS, "--csv", "-", "--key-column", "id", dsn=node.dsn, stdin=b"id,a\n,1\n,2\n")
    ids = [str(found) for (found,) in node.rows("SELECT message_id FROM mailroom.outbox ORDER BY position")]
    assert [key for key, _ in reaped(node)] == ids


def test_heading_alone_sends_nothing(node: Node) -> None:
    assert done(*ORDERS, "--csv", "-", dsn=node.dsn, stdin=b"id,a\n").startswith("0 messages")


WRONG_ROWS = [
    (b"k,1,2\n", "3 cells"),
    (b"k\n", "1 cells"),
    (b"k,\xff\n", "not UTF-8"),
    (b'k,"1"2\n', "expected after"),
    (b'k,"1\n', "unexpected end"),
    (b"k" * 1_025 + b",1\n", "1025 bytes"),
    (b"k\0,1\n", "NUL"),
    (b"k," + b"x" * 2**24 + b"\n", "16,777,216"),
    (b"k," + b"x" * (2**24 + 1) + b"\n", "field larger"),
]


@pytest.mark.slow
def test_wrong_row_is_named(node: Node) -> None:
    for last_row, fault in WRONG_ROWS:
        result = mailroom(
            *ORDERS, "--csv", "-", "--key-column", "id", dsn=node.dsn, stdin=b'id,a\na,"1\n"\n' + last_row
        )
        error = error_of(result)
        assert error.startswith("Row 2 (line 4): ")
        assert fault in error
        assert result.exit_code == 1


@pytest.mark.slow
def test_of_a_file_with_a_wrong_row_nothing_is_sent(node: Node) -> None:
    # More rows than are held in memory at a time, so some have gone to the database when the fault is met.
    good = b"id,a\n" + b"\n".join(b"b,%d" % n for n in range(20_500)) + b"\n"
    result = mailroom(*ORDERS, "--csv", "-", "--key-column", "id", dsn=node.dsn, stdin=good + b"k,1,2\n")
    assert error_of(result).startswith("Row 20501 (line 20502): ")
    assert node.waiting() == []


WRONG_HEADINGS = [
    (b"", "empty", 1),
    (b"a,b,a\n1,2,3\n", "more than once", 1),
    (b"a,\xff\n1,2\n", "not UTF-8", 1),
    (b'a,"b\n', "heading", 1),
    (b"a,b\n1,2\n", "no column 'id'; it has 'a', 'b'", 2),
]


def test_wrong_heading_is_told(node: Node) -> None:
    for content, fault, code in WRONG_HEADINGS:
        result = mailroom(*ORDERS, "--csv", "-", "--key-column", "id", dsn=node.dsn, stdin=content)
        assert fault in error_of(result)
        assert result.exit_code == code


def test_value_that_cannot_be_sent_says_where(node: Node) -> None:
    result = mailroom(*ORDERS, "--value", f'{{"a": [{2**64}]}}', dsn=node.dsn)
    assert "value.a[0]" in error_of(result)
    assert result.exit_code == 2


# -- What --json means ------------------------------------------------------------------------------------------------


def test_json_alone_asks_for_json(node: Node) -> None:
    for arguments in (
        (*ORDERS, "--value", '{"a": 1}', "--json"),
        (*ORDERS, "--json", "--value", '{"a": 1}'),
        ("--json", *ORDERS, "--value", '{"a": 1}'),
        ("outbox", "--json", "send", "orders", "--json", '{"a": 1}'),
        (*ORDERS, "--json", '{"a": 1}', "--json"),
    ):
        told = json.loads(done(*arguments, "--key", "k", dsn=node.dsn))
        assert told == {"id": str(node.value("SELECT message_id FROM mailroom.outbox")), "topic": "orders", "key": "k"}
        assert reaped(node) == [("k", {"a": 1})]


def test_json_with_a_value_is_the_value(node: Node) -> None:
    printed = done(*ORDERS, "--key", "k", "--json", '{"a": 1}', dsn=node.dsn)
    assert printed.strip() == str(node.value("SELECT message_id FROM mailroom.outbox"))
    assert reaped(node) == [("k", {"a": 1})]


def test_any_value_can_be_given(node: Node) -> None:
    values = ("-5", '"--key"', "null", "true")
    for value in values:
        done(*ORDERS, "--key", "k", "--value", value, dsn=node.dsn)
    assert reaped(node) == [("k", json.loads(value)) for value in values]


WITHOUT_ONE_VALUE: list[tuple[str, ...]] = [
    ("--json", "1", "--value", "2"),
    ("--json", "1", "--json", "2"),
    ("--value", "1", "--value", "2"),
    ("--json", "1", "--csv", "-"),
    ("--value", "1", "--csv", "-"),
    ("--json", "-5"),
    ("--json", ""),
    ("--json",),
    (),
]


def test_no_value_is_left_out_without_a_word(node: Node) -> None:
    for arguments in WITHOUT_ONE_VALUE:
        result = mailroom(*ORDERS, *arguments, dsn=node.dsn, stdin=b"a\n1\n")
        error_of(result)
        assert (arguments, result.exit_code) == (arguments, 2)
    assert node.waiting() == []


# -- What else a message has ------------------------------------------------------------------------------------------

SENT = """
SELECT kind::text, message_type::text, event_type::text, headers, deliver_at, expires_at
FROM mailroom.outbox ORDER BY position
"""
FIELDS = ("--header", "user=ada", "--header", "note=a=b", "--message-type", "O", "--event-type", "C")
TIMES = ("--deliver-at", "2100-01-31T09:00:00+01:00", "--expires-at", "2100-01-31T09:00:00Z")


def test_message_has_headers_times_kind_and_types(node: Node) -> None:
    for kind in ("message", "event", "command"):
        done(*ORDERS, "--value", "1", *FIELDS, *TIMES, "--kind", kind, dsn=node.dsn)
    due = datetime(2100, 1, 31, 8, tzinfo=UTC)
    headers = {"user": "ada", "note": "a=b"}
    assert node.rows(SENT) == [(code, "O", "C", headers, due, due + timedelta(hours=1)) for code in "MEC"]


def test_rows_of_a_file_have_them_too(node: Node) -> None:
    done(*ORDERS, "--csv", "-", *FIELDS, *TIMES, "--kind", "event", dsn=node.dsn, stdin=b"a\n1\n2\n")
    [first, second] = node.rows(SENT)
    assert first == second == ("E", "O", "C", {"user": "ada", "note": "a=b"}, *first[4:])
    assert first[4:] == (datetime(2100, 1, 31, 8, tzinfo=UTC), datetime(2100, 1, 31, 9, tzinfo=UTC))


def test_time_may_be_told_from_now(node: Node) -> None:
    done(*ORDERS, "--value", "1", "--deliver-at", "+3600", "--expires-at", "+7200.5", dsn=node.dsn)
    [(deliver_at, expires_at)] = node.rows("SELECT deliver_at, expires_at FROM mailroom.outbox")
    # Each is told from the moment that its option is read.
    assert timedelta(0) <= expires_at - deliver_at - timedelta(seconds=3600.5) < timedelta(seconds=60)
    assert abs(deliver_at - node.value("SELECT sent_at FROM mailroom.outbox") - timedelta(hours=1)) < timedelta(
        minutes=5
    )


def test_command_asks_for_its_answer_by_a_header(node: Node) -> None:
    done(*ORDERS, "--value", "1", "--kind", "command", "--header", "reply_to=shop", dsn=node.dsn)
    node.deliver_all()
    [message] = Inbox("shipping").peek(node.connection)
    assert (message.kind, message.headers) == ("C", {"reply_to": "shop"})


WRONG = [
    (("--header", "user"), "not NAME=VALUE"),
    (("--header", "=ada"), "not NAME=VALUE"),
    (("--header", "user=ada", "--header", "user=bob"), "twice"),
    (("--header", f"user={'x' * 8_192}"), "8192 are allowed"),
    (("--deliver-at", "2100-01-31T09:00:00"), "with its zone"),
    (("--deliver-at", "tomorrow"), "with its zone"),
    (("--deliver-at", "+soon"), "seconds"),
    (("--expires-at", f"+{10**12}"), "with its zone"),
    (("--expires-at", "9999-06-01T00:00:00Z"), "outside the years"),
    (("--kind", "reply"), "'message', 'event', 'command'"),
    (("--message-type", "X"), "'O', 'D', 'C', 'U'"),
    (("--event-type", "X"), "'C', 'U', 'D'"),
]


def test_what_was_typed_wrong_is_wrong_usage(node: Node) -> None:
    for source, (arguments, told) in product((("--value", "1"), ("--csv", "-")), WRONG):
        result = mailroom(*ORDERS, *source, *arguments, dsn=node.dsn, stdin=b"a\n1\n")
        assert told in error_of(result)
        assert result.exit_code == 2
    assert node.waiting() == []
