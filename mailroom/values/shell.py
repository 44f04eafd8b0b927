"""Our commands as text that can be pasted into a shell: the log shows them."""

import shlex

from mailroom.values.names import DEFAULT_SCHEMA


def command(*words: object, schema: str = DEFAULT_SCHEMA) -> str:
    """Return `mailroom` with these arguments, for the node of this schema."""
    given = [] if schema == DEFAULT_SCHEMA else ["--schema", schema]
    return " ".join(["mailroom", *(quoted(str(word)) for word in (*words, *given))])


def quoted(text: str) -> str:
    """Return `text` as one word of bash, zsh and ksh, on one line and without terminal control characters."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_in_quotes, text)) + "'"


def _in_quotes(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode())
