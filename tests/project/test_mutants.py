"""Mutants stay usable: the text that each one changes stands where it says, and its tests are there."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mutants.mutant import Edit, Mutant, Unanchored, stored_mutants

ROOT = Path(__file__).parents[2]
MUTANTS = stored_mutants()


@cache
def functions(path: Path) -> frozenset[str]:
    # By its text: to parse all that mutants name takes each process four seconds.
    return frozenset(re.findall(r"^ *(?:async )?def (\w+)\(", path.read_text(), re.MULTILINE))


def wrong_with(mutant: Mutant) -> Iterator[str]:
    try:
        broken = mutant.broken(ROOT)
        for path, text in broken.items():
            if text == path.read_text():
                yield f"{mutant.name} changes nothing in {path}"
            if path.suffix == ".py":
                ast.parse(text)
    except (Unanchored, SyntaxError) as error:
        yield f"{mutant.name}: {error}"
    for test in mutant.tests:
        file, *names = test.partition("[")[0].split("::")
        if names[-1] not in functions(ROOT / file):
            yield f"{mutant.name}: there is no {test}"


@pytest.mark.slow
def test_mutants_apply_and_their_tests_exist() -> None:
    assert [trouble for mutant in MUTANTS for trouble in wrong_with(mutant)] == []


@pytest.mark.nightly  # as `make mutants`, which runs them
@pytest.mark.slow
def test_cases_that_mutants_name_exist() -> None:
    """They are in what CI runs, which has a sample of many cases and nothing that is nightly."""
    named = {test for mutant in MUTANTS for test in mutant.tests}
    if find_spec("pyspark") is None:  # its tests cannot be collected then
        named = {test for test in named if not test.startswith("tests/spark/")}
    files = sorted({test.partition("::")[0] for test in named})
    options = ("--collect-only", "--assert=plain", "--verbosity=-1", "--override-ini=addopts=", "--run", "check")
    command = [sys.executable, "-m", "pytest", *options, *files]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    collected = {name for line in lines for name in (line, line.partition("[")[0])}
    assert sorted(named - collected) == []


def test_no_two_mutants_have_one_name() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("find", ["c", "b", "b\na"])
def test_text_that_is_not_there_once_is_an_error(tmp_path: Path, find: str) -> None:
    (tmp_path / "module.py").write_text("a\nb\na\nb\na\n")
    with pytest.raises(Unanchored, match=r"module\.py"):
        Mutant("m", "a rule", ("t",), (Edit("module.py", find, ""),)).broken(tmp_path)


def test_edits_of_one_file_are_made_in_the_text_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("one two")
    edits = (Edit("module.py", "one", "two"), Edit("module.py", "two", "three"))
    assert Mutant("m", "a rule", ("t",), edits).broken(tmp_path) == {tmp_path / "module.py": "two three"}


def test_edits_that_overlap_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("one two")
    with pytest.raises(Unanchored, match="overlap"):
        Mutant("m", "a rule", ("t",), (Edit("module.py", "one t", ""), Edit("module.py", "two", ""))).broken(tmp_path)
