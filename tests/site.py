"""What `make docs` has built is whole: `python -m tests.site` reads site/ as a browser would, and says what is wrong.

Nothing is loaded from elsewhere, each link and anchor between pages exists, and the reference has each public name.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from tests.support.pages import ROOT, page_named

SITE = ROOT / "site"
# Its links begin at the root of a host, since a server shows it at any address.
NOT_FOUND = "404.html"
LOADED = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
ELSEWHERE = re.compile(r"(?:https?:)?//")


class Read(HTMLParser):
    """What a page loads, where its links lead, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down what a tag says."""
        given = {name: value or "" for name, value in attrs}
        if address := given.get(LOADED.get(tag, "")):
            self.loads.add(address)
        if tag == "a" and (address := given.get("href")):
            self.links.add(address)
        if anchor := given.get("id"):
            self.anchors.add(anchor)
            if tag == "h3":
                self.headings.append(anchor)


def read(site: Path) -> dict[Path, Read]:
    """Return the pages of a site."""
    return {path.resolve(): Read(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != NOT_FOUND}


def loaded_from_elsewhere(pages: dict[Path, Read]) -> Iterator[str]:
    """Say what pages load from other hosts."""
    for path, page in pages.items():
        for address in sorted(page.loads):
            if ELSEWHERE.match(address):
                yield f"{path.name} loads {address}"


def broken(pages: dict[Path, Read]) -> Iterator[str]:
    """Say which links between pages lead nowhere."""
    for path, page in pages.items():
        for address in sorted(page.links | page.loads):
            if re.match(r"[a-z]+:|//", address):
                continue
            target, _, anchor = unquote(address).partition("#")
            goal = (path.parent / target).resolve() if target else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists() or (anchor and goal in pages and anchor not in pages[goal].anchors):
                yield f"{path.name} leads to {address}"


def listed() -> dict[str, list[str]]:
    """Return the public names by their modules."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page_named("api.md").read_text(), re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def misnamed(pages: dict[Path, Read]) -> Iterator[str]:
    """Say which public names the reference lacks, and which of its names are not public."""
    shown = {name for path, page in pages.items() if path.name.startswith("api-") for name in page.headings}
    public = {f"{module}.{name}" for module, names in listed().items() for name in names}
    yield from (f"the reference lacks {name}" for name in sorted(public - shown))
    yield from (f"the reference has {name}, which is not public" for name in sorted(shown - public))


if __name__ == "__main__":
    found = read(SITE)
    wrong = [*loaded_from_elsewhere(found), *broken(found), *misnamed(found)]
    sys.exit("\n".join(wrong) if wrong or not found else None)
