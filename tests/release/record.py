"""`python -m tests.release.record`: run all that there is, and write the record that a release asks for.

`make check-all` calls it. Only what is committed counts, since the record names its commit. What fails leaves none.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click import echo

ROOT = Path(__file__).parents[2]
RECORD = Path("release", "check-all.json")
# Targets of the Makefile, the fast ones first.
TARGETS = ("lint", "test-wheel", "test-spark", "test-check", "faults", "mutants")
COUNTS = ("tests", "skipped")


def head(root: Path) -> str:
    return _git(root, "rev-parse", "HEAD")


def changed(root: Path) -> str:
    """Return what differs from the commit."""
    return _git(root, "status", "--porcelain")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def run_all(root: Path, targets: Iterable[str] = TARGETS) -> dict[str, Any]:
    """Run the targets, and return the record of them. SystemExit if one fails, or if something is not committed."""
    commit = head(root)
    _demand_committed(root, commit)
    with tempfile.TemporaryDirectory(prefix="mailroom-check-all-") as reports:
        minutes: dict[str, float] = {}
        for target in targets:
            began = time.monotonic()
            command = [os.environ.get("MAKE", "make"), "--no-print-directory", target, "RUN=all", f"REPORTS={reports}"]
            if subprocess.run(command, cwd=root, check=False).returncode:
                raise SystemExit(f"make {target} failed, so there is no record: see above")
            minutes[target] = round((time.monotonic() - began) / 60, 1)
            echo(f"make {target}: {minutes[target]} minutes", err=True)
        counts = {file.stem: counted(file) for file in sorted(Path(reports).glob("*.xml"))}
    _demand_committed(root, commit)
    return {"commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "minutes": minutes, "counts": counts}


def _demand_committed(root: Path, commit: str) -> None:
    if files := changed(root):
        raise SystemExit(f"The record is of a commit, and this is not committed:\n{files}")
    if head(root) != commit:
        raise SystemExit("Another commit was checked out meanwhile, so there is no record")


def counted(report: Path) -> dict[str, int]:
    """Return how many tests a report of pytest has, and how many of them were skipped."""
    suites = list(ET.parse(report).iter("testsuite"))
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in COUNTS}


def written(record: Mapping[str, Any], root: Path) -> Path:
    """Write a record and return its file, whose text also stands in the tag of the release."""
    file = root / RECORD
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    return file


def demand(root: Path) -> Mapping[str, Any]:
    """Return the record of HEAD. SystemExit if there is none, or if it lacks a target."""
    commit = head(root)
    try:
        record: Mapping[str, Any] = json.loads((root / RECORD).read_text())
        found, minutes = record["commit"], record["minutes"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"{RECORD} is not a record of what was checked: run `make check-all`") from None
    if found != commit:
        raise SystemExit(f"{RECORD} is of {found}, and HEAD is {commit}: run `make check-all`")
    if missing := [target for target in TARGETS if target not in minutes]:
        raise SystemExit(f"{RECORD} has nothing of {', '.join(missing)}: run `make check-all`")
    return record


if __name__ == "__main__":
    echo(f"All passed: {written(run_all(ROOT), ROOT)}")
    sys.exit(0)
