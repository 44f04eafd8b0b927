"""Build the distributions so that anybody can build the same bytes."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from click import echo

ROOT = Path(__file__).parents[2]
SOURCES = (".", "benchmarks")


def twice(into: Path, scratch: Path) -> list[Path]:
    """Build the commit into `into` and once more, and return the files of the first. SystemExit if a byte differs."""
    again = scratch / "again"
    for directory in (into, again):
        shutil.rmtree(directory, ignore_errors=True)
        # What is committed, and nothing that lies about; each time somewhere else, so that no path gets into a file.
        with tempfile.TemporaryDirectory(dir=scratch) as checkout:
            exported = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "-x"], cwd=checkout, input=exported.stdout, check=True)
            for source in SOURCES:
                command = [
                    sys.executable,
                    "-m",
                    "build",
                    "--installer",
                    "uv",
                    "--outdir",
                    str(directory),
                    str(Path(checkout, source)),
                ]
                subprocess.run(command, check=True, capture_output=True, env=os.environ | time_of_the_commit())
    return compared(into, again)


def compared(first: Path, second: Path) -> list[Path]:
    """Return the files of the first directory, and print their sums. SystemExit unless the second has the same."""
    ours, others = sums(first), sums(second)
    if ours != others:
        different = sorted({name for name, _ in ours.items() ^ others.items()})
        raise SystemExit(f"built twice, these differ: {', '.join(different)}")
    for name, found in ours.items():
        echo(f"{found}  {name}")
    return [first / name for name in ours]


def time_of_the_commit() -> Mapping[str, str]:
    """Return SOURCE_DATE_EPOCH, the time that files of the distributions get: that of the commit."""
    told = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {"SOURCE_DATE_EPOCH": told.stdout.strip()}


def sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}
