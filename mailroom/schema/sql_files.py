"""Migrations that are written as SQL files: their statements, each by itself, and the comments for the database.

What stands after a `--` on the first line of a CREATE or on the line of a column is its comment in the database, so
that a table is read together with what it means. Comments on lines of their own are for readers of the file.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PIECE = re.compile(r"--[^\n]*|'[^']*'|\$\$.*?\$\$|[^;'$-]+|.", re.DOTALL)
COMMENTS_BEFORE = re.compile(r"(?:\s*--[^\n]*\n)*\s*")
CREATED = re.compile(r"CREATE (TABLE|VIEW|FUNCTION) (\w+)[^\n]*  -- (.+)")
COLUMN = re.compile(r'^    (?:\S+ +AS )?("?\w+"?),?(?: .*)?  -- (.+)$', re.MULTILINE)


def statements_of(files: Iterable[Path], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the statements of the files; `{name}` stands for what `names` has for it."""
    for file in files:
        text = file.read_text()
        for name, value in names.items():
            text = text.replace("{" + name + "}", value)
        for statement in _parted(text):
            yield statement
            yield from _comments(statement)


def _parted(text: str) -> Iterator[str]:
    parts: list[str] = []
    for piece in PIECE.findall(text):
        if piece != ";":
            parts.append(piece)
            continue
        statement = "".join(parts)
        parts.clear()
        yield statement[len(COMMENTS_BEFORE.match(statement)[0]) :]  # type: ignore[index]  # it matches nothing too


def _comments(statement: str) -> Iterator[str]:
    if created := CREATED.match(statement):
        kind, name, about = created.groups()
        yield _comment(kind, name, about)
        if kind != "FUNCTION":
            for column, text in COLUMN.findall(statement):
                yield _comment("COLUMN", f"{name}.{column}", text)


def _comment(kind: str, name: str, text: str) -> str:
    quoted = text.replace("'", "''")
    return f"COMMENT ON {kind} {name} IS '{quoted}'"
