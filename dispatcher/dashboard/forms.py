"""What a form says. A browser changes the ends of lines in a value, so what a page fixes in a form is packed.

A packed text has the characters of an address and no others, so a key comes back as it is.
"""

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request

from dispatcher.dashboard.guard import Refused

FORM = "application/x-www-form-urlencoded"
PACKED = "packed"  # the field of a form that holds all that the page has fixed in it
# A form has a page of ticked keys at most, of 1 KiB each, whose bytes may become five each.
MOST_BYTES = 320 * 1024
MOST_FIELDS = 70


def packed(fields: Mapping[str, object]) -> str:
    """Return fields as one value for a form; those that are None are left out."""
    return urlencode({name: value for name, value in fields.items() if value is not None})


def parsed(text: str) -> dict[str, str]:
    """Return the fields of a text, each of which it has once; raises `Refused` for anything else."""
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict", strict_parsing=bool(text)
        )
    except ValueError:
        raise Refused(400, "That is not a form.") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise Refused(400, "A field is given twice.")
    return fields


def unpacked(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that a user filled in, with those that the page fixed; raises `Refused` as `parsed` does."""
    given = dict(fields)
    fixed = parsed(given.pop(PACKED, ""))
    if given.keys() & fixed.keys():
        raise Refused(400, "A field is given twice.")
    found = given | fixed
    if any("\0" in value for value in found.values()):  # which no text of the database has
        raise Refused(400, "A field has a NUL byte.")
    return found


# D-dashboard-5: Forms are read by hand.
async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form that was sent; raises `Refused` for anything else."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise Refused(415, "Only forms are taken.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(413, "The form is too large.")
    if not body.isascii():
        raise Refused(400, "That is not a form.")
    return unpacked(parsed(body.decode("ascii")))
