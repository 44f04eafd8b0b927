"""The headers of a record at NATS: text in one line, and a key, which NATS itself does not have."""

import string
from urllib.parse import quote
from uuid import UUID

from nats.js.api import Header

from mailroom.bridges.record import Record

KEY = "mailroom-key"
ORIGIN = "mailroom-origin"
LINK = "mailroom-link"
CLOCK = "mailroom-clock"
# What CloudEvents leaves as it is in a header of HTTP, and so of NATS: all that is printable but for space, " and %.
AS_IT_IS = "".join(set(string.punctuation) - set('"%'))


def headers_of(record: Record, stream: str, expected_last: int, behind: UUID | None) -> dict[str, str]:
    """Return what goes with the record, which is added to `stream` only if that ends at `expected_last`.

    With `behind`, its last record has to be that one, too.
    """
    headers = {
        # A key can have any characters, and so can those that are made of it. The others are one line of text.
        name: quote(value, safe=AS_IT_IS) if name.startswith("ce_") else value.decode()
        for name, value in record.headers
    }
    if record.key is not None:
        headers[KEY] = quote(record.key, safe=AS_IT_IS)
    own = {
        Header.MSG_ID: str(record.id), Header.EXPECTED_STREAM: stream,
        Header.EXPECTED_LAST_SEQUENCE: str(expected_last),
    }  # fmt: skip
    if behind is not None:
        own[Header.EXPECTED_LAST_MSG_ID] = str(behind)
    return headers | {name.value: text for name, text in own.items()}
