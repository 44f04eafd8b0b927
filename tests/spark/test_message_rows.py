"""Rows of the database become arrays of Arrow, of the types that readers declare."""

from typing import Any

import pyarrow as pa
import pytest

from spark_jobs.arrow.message_rows import HEADERS, arrays

JUST_HEADERS = pa.schema({"headers": HEADERS})


@pytest.mark.parametrize(
    ("texts", "maps"),
    [
        ((None,), [None]),
        (("{}",), [[]]),
        (
            ('{"a": "1", "b": ""}', None, "{}", '{"a": "], [", "\\u00e9": "\\ud83d\\ude00 \\" null"}', None),
            [[("a", "1"), ("b", "")], None, [], [("a", "], ["), ("é", '😀 " null')], None],
        ),
    ],
    ids=["none", "empty", "many"],
)
def test_headers_are_maps_in_their_rows(texts: tuple[str | None, ...], maps: list[Any]) -> None:
    [found] = arrays([(text,) for text in texts], JUST_HEADERS)
    found.validate(full=True)
    assert found.type == HEADERS
    assert found.to_pylist() == maps
