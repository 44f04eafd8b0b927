"""The record of `make check-all`: what it holds, and that a release asks for that of its commit."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release import __main__ as release
from tests.release import record

ROOT = Path(__file__).parents[2]
MAKEFILE = """
lint:
	@test "$(RUN)" = all
test-check:
	@echo '<testsuites><testsuite tests="7" skipped="2" failures="0"/></testsuites>' > $(REPORTS)/$@.xml
fails:
	@false
changes:
	@touch new
"""


def git(root: Path, *arguments: str) -> str:
    author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings = author | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(["git", *arguments], cwd=root, env=os.environ | settings, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a Makefile."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("/release/\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


@pytest.fixture(autouse=True)
def no_make_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the variables of the make that runs this."""
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)


def of(root: Path, **changes: Any) -> dict[str, Any]:
    return {"commit": record.head(root), "date": "2026-01-01", "minutes": dict.fromkeys(record.TARGETS, 1.0)} | changes


def test_record_has_commit_minutes_and_counts(root: Path) -> None:
    found = record.run_all(root, ("lint", "test-check"))
    assert found["commit"] == git(root, "rev-parse", "HEAD").strip()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["minutes"].keys() == {"lint", "test-check"}
    assert found["counts"] == {"test-check": {"tests": 7, "skipped": 2}}


def test_there_is_no_record_of_what_failed_or_is_not_committed(root: Path) -> None:
    with pytest.raises(SystemExit, match="make fails failed"):
        record.run_all(root, ("lint", "fails"))
    with pytest.raises(SystemExit, match=r"not committed:\n\?\? new"):
        record.run_all(root, ("changes",))
    with pytest.raises(SystemExit, match="not committed"):
        record.run_all(root, ("lint",))


def test_a_release_wants_the_whole_record_of_its_commit(root: Path) -> None:
    for text in (None, "", "[]", "{}"):
        if text is not None:
            (root / record.RECORD).parent.mkdir(exist_ok=True)
            (root / record.RECORD).write_text(text)
        with pytest.raises(SystemExit, match="is not a record of what was checked: run `make check-all`"):
            record.demand(root)
    whole = of(root)
    record.written(whole, root)
    assert record.demand(root) == whole
    record.written(of(root, minutes={"lint": 1.0}), root)
    with pytest.raises(SystemExit, match=r"has nothing of test-wheel, .*, mutants: run `make check-all`"):
        record.demand(root)
    record.written(whole, root)
    git(root, "commit", "--quiet", "--allow-empty", "--message", "next")
    with pytest.raises(SystemExit, match=r"HEAD is .*: run `make check-all`"):
        record.demand(root)


def test_release_check_asks_for_it_before_anything_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ROOT", root)
    monkeypatch.setattr("sys.argv", ["release", "--into", str(root / "into")])
    with pytest.raises(SystemExit, match="is not a record of what was checked"):
        release.main()
    assert not (root / "into").exists()


def test_the_record_goes_with_the_tag(root: Path) -> None:
    """As CONTRIBUTING.md makes the tag, but for its signature, and as the workflow reads it."""
    whole = of(root)
    file = record.written(whole, root)
    [tagged] = re.findall(r"`git tag -s v0.1.0 (.*?)`", (ROOT / "CONTRIBUTING.md").read_text())
    git(root, "tag", "-a", "v0.1.0", *tagged.split())
    file.unlink()
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["check"]["steps"]
    [step] = [each["run"] for each in steps if str(record.RECORD) in each.get("run", "")]
    _, *rest = step.splitlines()  # what fetches the tag
    subprocess.run(["sh", "-ec", "\n".join(rest)], cwd=root, env=os.environ | {"GITHUB_REF_NAME": "v0.1.0"}, check=True)
    assert record.demand(root) == whole


def test_what_is_run_are_targets_of_ours() -> None:
    listed = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {*record.TARGETS, "check-all"} <= {*listed}
