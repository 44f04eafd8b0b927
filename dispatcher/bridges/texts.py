"""What clients say in their errors, for those who read it."""

import re

# How a client names an object: all but its class is of no use to anybody.
OBJECT = re.compile(r"<(?:\w+\.)*(\w+)\b[^<>]* at 0x[0-9a-fA-F]+>")


def plain(error: BaseException, text: str) -> str:
    """Return the text of an error in which objects are named by their classes; it never is empty."""
    named = OBJECT.sub(r"\1", text).strip()
    kind = type(error).__name__
    return f"{kind}: {named}" if OBJECT.fullmatch(text.strip()) else named or kind
