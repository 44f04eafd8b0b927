"""Rows over a limit are refused in their task, by the name of their column and without what they hold."""

from typing import Any

import pyarrow as pa
import pytest
from psycopg import pq

from mailroom.errors import ConfigurationError, InvalidMessage
from mailroom.session import settings
from spark_jobs.node import without_password
from spark_jobs.write.columns import WRITTEN_COLUMNS

NOT_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"k\xff")])


def prepared(name: str, *rows: Any, kind: pa.DataType | None = None) -> list[Any]:
    return WRITTEN_COLUMNS[name].prepared(pa.array(rows, kind or pa.string())).to_pylist()  # type: ignore[no-any-return]  # of Arrow


def test_topic_that_is_none() -> None:
    for topic in ("!!bad topic", "9lives", "a" * 201, "a\n", "", None, "a b", "\0"):
        with pytest.raises(InvalidMessage, match="Column topic has a row that") as refused:
            prepared("topic", "good.topic-1_x", topic)
        assert not topic or topic not in str(refused.value)


def test_topics() -> None:
    assert prepared("topic", "a", "A.b-c_9", "a" * 200) == ["a", "A.b-c_9", "a" * 200]


def test_key_over_a_limit() -> None:
    for key in ("", "k" * 1025, "\u00e9" * 513, "a\0b"):
        with pytest.raises(InvalidMessage, match="Column key has a row that"):
            prepared("key", "good", key)


def test_keys() -> None:
    assert prepared("key", "a", None, "\u00e9" * 512) == ["a", None, "\u00e9" * 512]
    assert prepared("key", 42, None, -1, kind=pa.int64()) == ["42", None, "-1"]


def test_text_that_is_not_utf8() -> None:
    for name in ("key", "topic", "message_id"):
        with pytest.raises(InvalidMessage, match=f"Column {name} has a row that"):
            WRITTEN_COLUMNS[name].prepared(NOT_UTF8)


OTHERS: list[tuple[str, Any, pa.DataType]] = [
    ("message_id", "no uuid", pa.string()),
    ("kind", "X", pa.string()),
    ("kind", "ME", pa.string()),
    ("event_type", "O", pa.string()),
    ("after_clock", -1, pa.int64()),
    ("after_clock", 2**62 + 1, pa.int64()),
    ("deliver_at", -(10**17), pa.timestamp("us", "UTC")),
    ("expires_at", 253370764800000000, pa.timestamp("us", "UTC")),
]


def test_other_columns() -> None:
    for name, row, kind in OTHERS:
        with pytest.raises(InvalidMessage, match=f"Column {name} has a row that"):
            prepared(name, row, kind=kind)


def test_headers_over_a_limit() -> None:
    kind = pa.map_(pa.string(), pa.string())
    assert prepared("headers", [("a", "b")], None, [], kind=kind) == ['{"a": "b"}', None, None]
    with pytest.raises(InvalidMessage, match="8192 are allowed"):
        prepared("headers", [("a", "b" * 9000)], kind=kind)
    with pytest.raises(InvalidMessage, match="Header 'a' is not text to text"):
        prepared("headers", [("a", None)], kind=kind)


def test_no_secret_in_the_option_dsn() -> None:
    # An older libpq refuses what it does not know.
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for secret in sorted(settings.secrets()):
        fault = "holds a password, or other credentials" if secret in known else "cannot be read"
        with pytest.raises(ConfigurationError, match=fault) as refused:
            without_password(f"host=h user=u {secret}=geheim")
        assert "geheim" not in str(refused.value)


def test_secrets_are_those_that_libpq_marks_and_those_that_it_does_not() -> None:
    marked = {option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*"}
    assert marked | {"oauth_client_secret", "scram_client_key", "scram_server_key"} <= settings.secrets()
