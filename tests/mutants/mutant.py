"""A mutant as it is stored: a rule, the tests that stand for it, and the edits that break it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Unanchored(Exception):
    """An edit's text is not in its file, or there more than once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In `file`, the text `find`, which stands there once, becomes `replace`."""

    file: str
    find: str
    replace: str


# D-tests-6: `make mutants` breaks each rule once.
@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule, broken by `edits`; at least one of `tests` must then fail."""

    name: str
    rule: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]

    def broken(self, root: Path) -> dict[Path, str]:
        """Return the files that the mutant changes below `root`, and their text with the rule broken."""
        files: dict[Path, list[tuple[int, int, str]]] = {}
        for edit in self.edits:
            path = root / edit.file
            text = path.read_text() if path.is_file() else ""
            if text.count(edit.find) != 1:
                raise Unanchored(
                    f"{self.name}: this must stand once in {edit.file}, and stands there {text.count(edit.find)} times:"
                    f"\n{edit.find}"
                )
            begin = text.index(edit.find)
            files.setdefault(path, []).append((begin, begin + len(edit.find), edit.replace))
        return {path: _replaced(path.read_text(), spans) for path, spans in files.items()}


def _replaced(text: str, spans: list[tuple[int, int, str]]) -> str:
    last_first = sorted(spans, reverse=True)
    if any(end > begin for (begin, _, _), (_, end, _) in pairwise(last_first)):
        raise Unanchored("two edits of one mutant overlap")
    for begin, end, replacement in last_first:
        text = text[:begin] + replacement + text[end:]
    return text


def stored_mutants() -> list[Mutant]:
    """Return all mutants: those of one package stand in one file."""
    return [_read(entry) for file in sorted(HERE.glob("*.toml")) for entry in tomllib.loads(file.read_text())["mutant"]]


def _read(entry: Mapping[str, Any]) -> Mutant:
    edits = tuple(Edit(**edit) for edit in entry["edit"])
    if set(entry) != {"name", "rule", "tests", "edit"} or not entry["tests"] or not edits:
        raise ValueError(f"A mutant has a name, a rule, tests and edits, and nothing else: {entry}")
    return Mutant(entry["name"], entry["rule"], tuple(entry["tests"]), edits)
