"""Names, keys and texts: the one place for every alphabet and limit. The tables' own rules repeat them."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeAlias
from uuid import UUID

from mailroom.errors import InvalidMessage, InvalidName

MAX_KEY_BYTES = 1_024
MAX_VALUE_BYTES = 16 * 1024 * 1024
MAX_HEADERS_BYTES = 8 * 1024
MAX_TOPIC_LENGTH = 200
MAX_AFTER_CLOCK = 2**62
MAX_COUNT = 1_000_000  # the largest limit that a caller can give
DEFAULT_SCHEMA = "mailroom"
APPLICATION = "mailroom "  # what the name of each session of ours begins with

Key: TypeAlias = str | int | UUID

IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,40}\Z")
TOPIC = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,199}\Z")
# Words of a pattern; one that ends in # has no *, since only the number of its words keeps a * to one word.
PATTERN = re.compile(r"(?:(?:[A-Za-z][\w-]*|\*)(?:\.(?:[\w-]*|\*))*|(?:[A-Za-z][\w.-]*\.)?#)\Z", re.ASCII)

NODE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}\Z")
ONE, MANY = "*", "#"  # words of a pattern: one word, and any number of them or none
OWN, ALL = "", "*"  # origins of a subscription that are no node's name: this node, and this node and all that it reads


def schema_name(name: str) -> str:
    """Return `name` if it is valid as a node's schema, else raise `InvalidName`."""
    schema = _identifier(name, "schema")
    if schema.startswith("pg_"):
        raise InvalidName(f"Schema name {shown(name)} is not valid: PostgreSQL keeps names that begin with pg_.")
    return schema


def inbox_name(name: str) -> str:
    """Return `name` if it is valid as an inbox, else raise `InvalidName`."""
    inbox = _identifier(name, "inbox")
    # The partition of an inbox is inbox_<name>. No other table of Mailroom begins like that (a test checks it).
    if inbox == "registry":
        raise InvalidName(f"Inbox name {shown(name)} is not valid: inbox_registry is a table of Mailroom's own.")
    return inbox


def node_name(name: str) -> str:
    """Return `name` if it is valid as the name of a node or a link, else raise `InvalidName`."""
    if not isinstance(name, str) or not NODE.match(name):
        raise InvalidName(
            f"Node name {shown(name)} is not valid: use a letter, then up to 62 letters, digits, dots, hyphens or "
            "underscores."
        )
    return str.__str__(name)


def periodic_name(name: str) -> str:
    """Return `name` if it is valid as the name of a periodic message, else raise `InvalidName`."""
    if not isinstance(name, str) or not NODE.match(name):
        raise InvalidName(
            f"Name {shown(name)} of a periodic message is not valid: use a letter, then up to 62 letters, digits, "
            "dots, hyphens or underscores."
        )
    return str.__str__(name)


def origin_name(origin: str) -> str:
    """Return `origin` if it is a node's name, `*` or empty, as a subscription's may be, else raise `InvalidName`."""
    return str.__str__(origin) if origin in (OWN, ALL) else node_name(origin)


def executable_name(name: str) -> str:
    """Return `name` if it is valid as a target or function of executables, else raise `InvalidName`."""
    return _identifier(name, "target")


def topic_name(topic: str) -> str:
    """Return `topic` if it is valid, else raise `InvalidMessage`."""
    if not isinstance(topic, str) or not TOPIC.match(topic):
        raise InvalidMessage(
            f"Topic {shown(topic)} is not valid: use a letter, then up to {MAX_TOPIC_LENGTH - 1} letters, "
            "digits, dots, hyphens or underscores.",
            code="MR-invalid-topic",
        )
    return str.__str__(topic)


def fits(pattern: Sequence[str], topic: Sequence[str]) -> bool:
    """Return whether a valid pattern fits a topic, each given as its words."""
    if pattern[-1] == MANY:
        pattern = pattern[:-1]
        if len(topic) < len(pattern):
            return False
    elif len(topic) != len(pattern):
        return False
    return all(wanted in (ONE, word) for wanted, word in zip(pattern, topic, strict=False))


def topic_pattern(pattern: str) -> str:
    """Return `pattern` if it is a topic, or a pattern such as `order.*` or `order.#`, else raise `InvalidMessage`.

    Dots divide words. `*` stands for one word; `#`, at the end, for any number of words, or none.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_TOPIC_LENGTH or not PATTERN.match(pattern):
        raise InvalidMessage(
            f"Topic pattern {shown(pattern)} is not valid: use a topic, in which * may stand for a whole word, as in "
            f"order.*, or # for the last words, as in order.#, but not both; at most {MAX_TOPIC_LENGTH} characters.",
            code="MR-invalid-topic",
        )
    return str.__str__(pattern)


def _identifier(name: str, what: str) -> str:
    # These become SQL identifiers, also as parts of longer names. PostgreSQL silently cuts names at 63 bytes;
    # 41 leave room for every prefix.
    if not isinstance(name, str) or not IDENTIFIER.match(name):
        raise InvalidName(
            f"{what.capitalize()} name {shown(name)} is not valid: use a lower-case letter, then up to 40 "
            "lower-case letters, digits or underscores."
        )
    # Exactly the text that was checked: a subclass, such as a text enum, may render differently.
    return str.__str__(name)


def shown(text: object) -> str:
    """Return user input shortened and escaped, for an error line."""
    try:
        quoted = ascii(text)
    except ValueError:  # an int of more digits than Python writes
        quoted = f"of type {type(text).__name__}, too large to show"
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


def meant(name: str, known: Iterable[str]) -> str:
    """Return the question whether the nearest known name was meant, to follow an error's sentence; empty for none."""
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def key_text(key: Key) -> str:
    """Return the text that a key is stored as. Raises `InvalidMessage` if it is not a valid key."""
    # Most keys are ASCII. Of these it finds what the lines below would find, in a third of the time.
    if type(key) is str and key.isascii() and 1 <= len(key) <= MAX_KEY_BYTES and "\0" not in key:
        return key
    if isinstance(key, str):
        text = str.__str__(key)  # for a subclass (a text enum), the value itself, as the codec does
    elif isinstance(key, UUID):
        text = str(key)
    elif isinstance(key, int) and not isinstance(key, bool):
        text = _digits(key)
    else:
        raise InvalidMessage(
            f"A key is text, an int or a UUID, not {type(key).__name__}: pass str(...) of it.", code="MR-invalid-key"
        )
    size = len(utf8(text, "key"))
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidMessage(
            f"Key {shown(text)} has {size} bytes; 1 to {MAX_KEY_BYTES} are allowed. "
            "Use a digest of it, or key=None for a message without order.",
            code="MR-invalid-key",
        )
    return text


def _digits(key: int) -> str:
    if abs(key) >= 10**MAX_KEY_BYTES:
        raise InvalidMessage(
            f"The key is an int of more than {MAX_KEY_BYTES} digits: use a digest of it.", code="MR-invalid-key"
        )
    return str(int(key))


def utf8(text: str, what: str) -> bytes:
    """Return the text in UTF-8. Raises `InvalidMessage` if PostgreSQL cannot store it; `what` names the text."""
    if "\0" in text:
        raise InvalidMessage(
            f"The {what} contains a NUL character, which PostgreSQL's text cannot store.", code="MR-invalid-text"
        )
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(
            f"The {what} is not valid Unicode text (a lone surrogate).", code="MR-invalid-text"
        ) from None
