"""The headers of a request, made of a record, and what the headers of an answer say. Pure.

The attributes of CloudEvents stand as its HTTP binding has them in binary mode: `ce-id`, percent-encoded. A header of
the message's own is sent as it is if HTTP, and the servers on the way, leave it as it is. The others are in
`mailroom-headers`, a JSON map, beside those that no broker's headers can hold.
"""

import json
import re
from datetime import MAXYEAR, UTC, datetime
from email.utils import parsedate_tz
from urllib.parse import quote

from mailroom.bridges.record import CONTENT_TYPE, Record, is_reserved
from outbox.webhooks.signature import ID, SIGNATURE, TIMESTAMP, sign

LONGEST_AFTER_S = 3_600.0

# All that is visible in ASCII, but for " and %.
AS_IT_IS = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
# Without underscores: many servers drop such headers in silence.
NAME = re.compile(r"[A-Za-z0-9.-]+\Z")
TEXT = re.compile(r"[ -~]*\Z")
# Those that say how a request is sent, and to whom, are not for a message to say.
OF_HTTP = re.compile(
    r"(host|connection|keep-alive|te|trailer|transfer-encoding|upgrade|expect|via|forwarded|authorization|cookie|"
    r"user-agent|date|range|if-.*|accept.*|content-.*|proxy-.*|x-forwarded-.*|x-real-ip|x-http-method.*|sec-.*|"
    r"webhook-.*|ce-.*|idempotency-key)\Z",
    re.IGNORECASE,
)
OTHERS = "mailroom-headers"


def headers_of(record: Record, timestamp: int, secrets: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """Return the headers of one attempt, which is signed for that time by all secrets."""
    found = {"user-agent": "mailroom", "accept": "*/*", ID: str(record.id), TIMESTAMP: str(timestamp)}
    if secrets:
        found[SIGNATURE] = sign(str(record.id), timestamp, record.value or b"", secrets)
    others: dict[str, str] = {}
    taken: set[str] = set()
    for name, raw in record.headers:
        text = raw.decode()
        if name == OTHERS:
            others |= json.loads(text)
        elif name == CONTENT_TYPE:
            found[name] = text
        elif is_reserved(name):
            found[name.replace("_", "-")] = quote(text, safe=AS_IT_IS)
        elif NAME.match(name) and TEXT.match(text) and not OF_HTTP.match(name) and name.lower() not in taken:
            taken.add(name.lower())  # `A` and `a` are one name in HTTP
            found[name] = text
        else:
            others[name] = text
    if others:
        found[OTHERS] = json.dumps(others, separators=(",", ":"))
    return [(name.encode(), text.encode()) for name, text in found.items()]


def retry_after_s(text: str | None, now: float) -> float:
    """Return for how many seconds an answer asks to wait, at most an hour; 0 if it says nothing that can be read.

    It raises for no text: that comes from a stranger.
    """
    if text is None:
        return 0.0
    if re.fullmatch(r"[0-9]+", text):
        return min(float(text), LONGEST_AFTER_S)  # infinity, if there are hundreds of digits
    try:
        parts = parsedate_tz(text)
        if parts is None:
            return 0.0
        if parts[0] > MAXYEAR:
            return LONGEST_AFTER_S
        moment = datetime(*parts[:6], tzinfo=UTC).timestamp() - (parts[9] or 0)
    except (ValueError, OverflowError):  # there is no such day, or no such hour
        return 0.0
    return min(max(0.0, moment - now), LONGEST_AFTER_S)
