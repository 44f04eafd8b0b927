"""A broker's package, installed for a test: its module, and what an installer writes beside that."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mailroom.bridges.broker import broker_of, brokers
from mailroom.packages.installed import declared

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "files_broker.py"
FILES = "files = files_broker:FILES\n"


def forget() -> None:
    """Forget which brokers there are."""
    for each in (declared, brokers, broker_of):
        each.cache_clear()


@contextmanager
def plugged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str = "files_broker", text: str | None = None,
    entry_points: str = FILES,
) -> Iterator[None]:  # fmt: skip
    """Have a package with these entry points in the folder, by default the example's."""
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[mailroom.brokers]\n{entry_points}")
    (folder / f"{module}.py").write_text(EXAMPLE.read_text() if text is None else text)
    monkeypatch.syspath_prepend(str(folder))
    forget()
    yield
    forget()
    sys.modules.pop(module, None)
