"""The pages of docs/ by their names, which are unique: no test has to know in which folder a page stands."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = DOCS / "operate" / "files"  # what an operator takes from the pages: units, manifests, rules of alerts


def page_named(name: str) -> Path:
    """Return where the page of this name is."""
    [path] = DOCS.rglob(name)
    return path
