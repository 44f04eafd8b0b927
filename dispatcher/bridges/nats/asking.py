"""Asks a server which records its stream has had, also of those that are deleted: for a time it knows their ids.

A server looks whether it knows an id before it looks at anything else that a record says. So one that can never be
added is answered as a duplicate if its id is known, and else as one that comes behind a wrong record.
"""

from collections.abc import Sequence

from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.errors import APIError

from mailroom.bridges.record import Record

# D-bridges-7: A record that can never be added asks NATS whether it had another one.
NEVER = 2**63 - 1  # no stream ends there
WRONG_LAST = 10071


async def had(context: JetStreamContext, stream: str, records: Sequence[Record]) -> int | None:
    """Return up to how many of these, which were sent in a row, the server knows; None if it does not say."""
    low, high = 0, len(records)
    while low < high:
        middle = (low + high + 1) // 2
        known = await _knows(context, stream, records[middle - 1])
        if known is None:
            return None
        low, high = (middle, high) if known else (low, middle - 1)
    return low


async def _knows(context: JetStreamContext, stream: str, record: Record) -> bool | None:
    headers = {
        Header.MSG_ID: str(record.id), Header.EXPECTED_STREAM: stream, Header.EXPECTED_LAST_SEQUENCE: str(NEVER),
    }  # fmt: skip
    try:
        answer = await context.publish(record.topic, b"", headers={name.value: text for name, text in headers.items()})
    except APIError as error:
        return False if error.err_code == WRONG_LAST else None
    except (Error, TimeoutError):  # what is wrong, the next try tells
        return None
    return bool(answer.duplicate)
