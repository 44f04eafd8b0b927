"""A mutant as it is stored: a rule, the tests that stand for it, and the diff that breaks it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule, broken by the diff in `patch`; at least one of `tests` must then fail."""

    rule: str
    patch: Path
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.patch.stem


def stored_mutants() -> list[Mutant]:
    """Return all mutants, in the order of their numbers."""
    return [_read(patch) for patch in sorted(Path(__file__).parent.glob("*.patch"))]


def _read(patch: Path) -> Mutant:
    header = patch.read_text().partition("\n\n")[0].splitlines()
    fields = [line.partition(": ") for line in header]
    [rule] = [value for name, _, value in fields if name == "Rule"]
    tests = tuple(value for name, _, value in fields if name == "Test")
    if not tests:
        raise ValueError(f"{patch.name} names no test: begin it with Rule: and Test: lines and an empty line.")
    return Mutant(rule, patch, tests)
