"""Modules as Python reads them, for tests that look at how the code is written."""

import ast
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path


def parsed(files: Iterable[Path], having: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """Yield the files and what is in them, or of those alone whose text has this.

    There is no collection of garbage before the last: each would go over all that is kept, for as long again.
    """
    gc.disable()
    try:
        for path in files:
            if having in (text := path.read_text()):
                yield path, ast.parse(text)
    finally:
        gc.enable()
