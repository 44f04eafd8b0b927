"""Headers as the tables take them: a flat map of text to text, at most 8 KiB as JSON."""

import json
from collections.abc import Mapping

from mailroom.errors import InvalidMessage
from mailroom.values.names import MAX_HEADERS_BYTES, shown, utf8

TEXT = json.JSONEncoder(ensure_ascii=False).encode  # made once: `dumps` would make one for each call


def checked(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers, whatever their size. Raises `InvalidMessage` if they are not text to text."""
    if not isinstance(headers, Mapping):
        raise InvalidMessage(
            f"headers are a mapping of text to text, not {type(headers).__name__}.", code="MR-invalid-headers"
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(
                f"Header {shown(name)} is not text to text: put structured data into the value.",
                code="MR-invalid-headers",
            )
        utf8(name, "name of a header")
        utf8(value, f"header {shown(name)}")
    return dict(headers)


def given(headers: Mapping[str, str] | None) -> dict[str, str]:
    """`checked`, with None for none."""
    return {} if headers is None else checked(headers)


def size(headers: Mapping[str, str]) -> int:
    """Return how many bytes checked headers have as jsonb's text form, which the table's rule measures.

    The sizes of maps that have no name in common add up to that of the map of all of them.
    """
    return len(_json(headers).encode()) if headers else 0


def _json(headers: Mapping[str, str]) -> str:
    # Of a map of two the encoder itself takes 1 us more: it is made for nested ones.
    return "{" + ", ".join([f"{TEXT(name)}: {TEXT(value)}" for name, value in headers.items()]) + "}"


def as_json(headers: Mapping[str, str]) -> str | None:
    """Return checked headers as JSON, None if there are none. Raises `InvalidMessage` if they are too large."""
    if not headers:
        return None
    text = _json(headers)
    if (found := len(text.encode())) > MAX_HEADERS_BYTES:
        raise InvalidMessage(
            f"The headers have {found} bytes as JSON; {MAX_HEADERS_BYTES} are allowed. Put large data into the value.",
            code="MR-headers-too-large",
        )
    return text if text.isascii() else json.dumps(dict(headers))  # in ASCII, which every client encoding has
