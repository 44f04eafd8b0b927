"""`mailroom outbox send`: one message, and CSV files that are sent whole or not at all."""

import json
from pathlib import Path

import pytest

from tests.command import done, error_of, mailroom
from tests.databases import Connect
from tests.node import Node

ORDERS = ("outbox", "send", "orders")


@pytest.fixture
def node(dsn: str, connect: Connect) -> Node:
    made = Node(dsn, connect(autocommit=True))
    made.inbox("shipping", "orders")
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "orders.csv"


def reaped(node: Node) -> list[tuple[str, object]]:
    node.drain()
    lines = done("inbox", "reap", "shipping", "--any", "--limit", "100000", "--json", dsn=node.dsn).splitlines()
    messages = sorted(map(json.loads, lines), key=lambda message: int(message["clock"]))
    return [(message["key"], message["value"]) for message in messages]


def test_one_message_is_sent_and_its_id_printed(node: Node) -> None:
    message_id = done(*ORDERS, "--key", "order-42", "--json", '{"état": [1, 2.5, null]}', dsn=node.dsn).strip()
    assert message_id == str(node.value("SELECT message_id FROM mailroom.outbox"))
    assert reaped(node) == [("order-42", {"état": [1, 2.5, None]})]


def test_message_without_key_is_unordered(node: Node) -> None:
    message_id = done(*ORDERS, "--json", "1", dsn=node.dsn).strip()
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


@pytest.mark.parametrize(
    ("last_row", "fault"),
    [
        (b"k,1,2\n", "3 cells"),
        (b"k\n", "1 cells"),
        (b"k,\xff\n", "not UTF-8"),
        (b'k,"1"2\n', "expected after"),
        (b'k,"1\n', "unexpected end"),
        (b"k" * 1_025 + b",1\n", "1025 bytes"),
        (b"k\0,1\n", "NUL"),
        (b"k," + b"x" * 2**24 + b"\n", "16,777,216"),
        (b"k," + b"x" * (2**24 + 1) + b"\n", "field larger"),
    ],
)
def test_wrong_row_is_named_and_nothing_is_sent(last_row: bytes, fault: str, node: Node) -> None:
    # More rows than are held in memory at a time, so some have gone to the database when the fault is met.
    good = b'id,a\na,"1\n"\n' + b"\n".join(b"b,%d" % n for n in range(20_500)) + b"\n"
    result = mailroom(*ORDERS, "--csv", "-", "--key-column", "id", dsn=node.dsn, stdin=good + last_row)
    error = error_of(result)
    assert error.startswith("Row 20502 (line 20504): ")
    assert fault in error
    assert result.exit_code == 1
    assert node.waiting() == []


@pytest.mark.parametrize(
    ("content", "fault", "code"),
    [
        (b"", "empty", 1),
        (b"a,b,a\n1,2,3\n", "more than once", 1),
        (b"a,\xff\n1,2\n", "not UTF-8", 1),
        (b'a,"b\n', "heading", 1),
        (b"a,b\n1,2\n", "no column 'id'; it has 'a', 'b'", 2),
    ],
)
def test_wrong_heading_is_told(content: bytes, fault: str, code: int, node: Node) -> None:
    result = mailroom(*ORDERS, "--csv", "-", "--key-column", "id", dsn=node.dsn, stdin=content)
    assert fault in error_of(result)
    assert result.exit_code == code


def test_value_that_cannot_be_sent_says_where(node: Node) -> None:
    assert "value.a[0]" in error_of(mailroom(*ORDERS, "--json", f'{{"a": [{2**64}]}}', dsn=node.dsn))
