"""The pages of docs/ by their names, which are unique: no test has to know in which folder a page stands.

Those of decisions are named as their rooms are, and stand apart.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"
FILES = DOCS / "operate" / "files"  # what an operator takes from the pages: units, manifests, rules of alerts


def page_named(name: str) -> Path:
    """Return where the page of this name is."""
    [path] = (path for path in DOCS.rglob(name) if path.parent != DECISIONS)
    return path
