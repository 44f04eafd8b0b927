"""What a newcomer reads first is true: CONTRIBUTING.md names what exists, and the hooks of a commit are `make lint`."""

import re
from pathlib import Path

import pytest
import yaml

from tests.release.record import RECORD

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CODE_SPAN = re.compile(r"`([^`\n]+)`")
# With a slash, or a file of the root; names that a recipe leaves open (NAME, *) are the reader's to fill in.
PATH = re.compile(r"\.?[A-Za-z][\w.*-]*(?:/[\w.*-]+)+|[\w-]+\.(?:md|toml|yaml|py)|Makefile")
MODULE = re.compile(r"python -m (tests[\w.]*)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")
LONGEST = 150
LONGEST_CHANGES = 15


def spans() -> list[str]:
    """Return what stands in code spans, and the lines of console blocks."""
    return [*CODE_SPAN.findall(CONTRIBUTING), *re.findall(r"^\$ (.+)$", CONTRIBUTING, re.MULTILINE)]


def paths() -> set[str]:
    return {span for span in spans() if PATH.fullmatch(span) and "NAME" not in span}


def targets_of(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def commands_of(target: str) -> list[str]:
    """Return the commands of a target of the Makefile, with its variables replaced."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, f"the Makefile has no commands for {target}"
    variables = dict(re.findall(r"^(\w+) [?:]?= (.*)$", MAKEFILE, re.MULTILINE))
    commands = found[1]
    while "$(" in commands:
        commands = re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], commands)
    return [command.strip() for command in commands.splitlines()]


def test_contributing_is_short() -> None:
    assert len(CONTRIBUTING.splitlines()) <= LONGEST


def test_every_path_in_contributing_exists() -> None:
    named = paths()
    assert {"mailroom/message/columns.py", "pyproject.toml", "tests/sql", "tests/cli"} <= named
    named.remove(str(RECORD))  # which a maintainer makes
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []


def test_every_module_in_contributing_is_there() -> None:
    modules = {module for span in spans() for module in MODULE.findall(span)}
    assert modules
    for module in modules:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_every_make_target_in_contributing_exists() -> None:
    named = {target for span in spans() for target in TARGET.findall(span)}
    assert {"test", "check", "lint", "format", "mutants", "faults", "bench", "sql"} <= named
    assert named <= targets_of(MAKEFILE)


def test_every_constant_in_contributing_is_in_the_file_named_beside_it() -> None:
    text = "\n".join(path.read_text() for each in paths() for path in ROOT.glob(each) if path.suffix == ".py")
    for name in re.findall(r"`([A-Z][A-Z_]{3,})`", CONTRIBUTING):
        assert re.search(rf"^{name}\b.* = ", text, re.MULTILINE), name


def test_the_mutant_that_contributing_runs_exists() -> None:
    [name] = re.findall(r"tests\.mutants --only (\S+)", CONTRIBUTING)
    assert any(f'name = "{name}"' in file.read_text() for file in (ROOT / "tests" / "mutants").glob("*.toml"))


def test_the_hooks_of_a_commit_are_the_commands_of_make_lint() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert [repository["repo"] for repository in repositories] == ["local"], "others bring versions of their own"
    assert [hook["entry"] for hook in hooks] == commands_of("lint")
    for hook in hooks:
        assert (hook["language"], hook["pass_filenames"]) == ("system", False)
        for file in ("mailroom/values/names.py", "pyproject.toml"):
            assert re.search(hook["files"], file)


def test_changes_of_the_version_that_is_not_released_are_few() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, unreleased, *_ = re.split(r"^## ", text, flags=re.MULTILINE)
    assert unreleased.startswith("[Unreleased]")
    assert len([line for line in unreleased.splitlines()[1:] if line.strip()]) <= LONGEST_CHANGES


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", ".editorconfig", ".pre-commit-config.yaml"])
def test_files_of_the_root_are_in_the_source_distribution(name: str) -> None:
    assert f'"/{name}"' in (ROOT / "pyproject.toml").read_text()
