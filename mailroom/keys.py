"""Keys: what may order messages, and the text it is stored as, the same for who sends and who reaps."""

from typing import TypeAlias
from uuid import UUID

from mailroom.errors import InvalidMessage
from mailroom.names import MAX_KEY_BYTES, shown

Key: TypeAlias = str | int | UUID


def key_text(key: Key) -> str:
    """Return the text a key is stored as; refuse what cannot be one."""
    if isinstance(key, bool) or not isinstance(key, str | int | UUID):
        raise InvalidMessage(f"A key is text, an int or a UUID, not {type(key).__name__}: pass str(...) of it.")
    # Of what subclasses them (an enum of text) the value itself, as the codec takes it.
    text = str.__str__(key) if isinstance(key, str) else str(key) if isinstance(key, UUID) else _digits(key)
    size = len(utf8(text, "key"))
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidMessage(
            f"Key {shown(text)} has {size} bytes; 1 to {MAX_KEY_BYTES} are allowed. "
            "Use a digest of it, or key=None for a message without order."
        )
    return text


def _digits(key: int) -> str:
    if abs(key) >= 10**MAX_KEY_BYTES:
        raise InvalidMessage(f"The key is an int of more than {MAX_KEY_BYTES} digits: use a digest of it.")
    return str(int(key))


def utf8(text: str, what: str) -> bytes:
    """Return the text as PostgreSQL stores it; refuse what it cannot. `what` names it in the error."""
    if "\0" in text:
        raise InvalidMessage(f"The {what} holds a NUL character, which PostgreSQL's text cannot.")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"The {what} is not valid Unicode text (a lone surrogate).") from None
