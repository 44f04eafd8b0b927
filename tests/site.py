"""What `make docs` has built is whole: `python -m tests.site` reads site/ as a browser would, and says what is wrong.

Nothing is loaded from elsewhere, each link and anchor between pages exists, the reference has each public name, and the
search shows the page that is looked for (where there is Node.js).
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent
from urllib.parse import unquote

from tests.search import SITE, unfound
from tests.support.pages import DOCS, page_named

# Its links begin at the root of a host, since a server shows it at any address.
NOT_FOUND = "404.html"
CONSOLE = re.compile(r"^[ ]*```console\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
HIDDEN = {"gp", "go"}  # a prompt, and what a command prints
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


class Copied(HTMLParser):
    """What the button of each block of commands copies: its text without the parts that `assets/site.css` hides."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self._kinds: list[str] = []
        self._has_prompt = False
        self._copied: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block, or a part of it."""
        if tag == "code":
            self._copied, self._kinds, self._has_prompt = [], [], False
        elif tag == "span":
            self._kinds.append(dict(attrs).get("class") or "")
            self._has_prompt |= self._kinds[-1] == "gp"

    def handle_endtag(self, tag: str) -> None:
        """End a part of a block, or the block."""
        if tag == "span" and self._kinds:
            self._kinds.pop()
        elif tag == "code" and self._has_prompt:
            self.blocks.append("".join(self._copied))
            self._has_prompt = False

    def handle_data(self, data: str) -> None:
        """Take down what is not hidden."""
        if not HIDDEN.intersection(self._kinds):
            self._copied.append(data)


def ill_copied(site: Path) -> Iterator[str]:
    """Say which blocks of commands give something else when they are pasted into a shell."""
    for page in sorted(DOCS.rglob("*.md")):
        expected = [commands_in(text) for text in CONSOLE.findall(page.read_text())]
        html = (site / page.relative_to(DOCS)).with_suffix(".html").read_text()
        copied = [[line for line in block.splitlines() if line.strip()] for block in Copied(html).blocks]
        if copied != expected:
            differs = next(pair for pair in zip_longest(copied, expected) if pair[0] != pair[1])
            yield f"{page.name}: its button copies {differs[0]} in place of {differs[1]}"


def commands_in(text: str) -> list[str]:
    """Return the lines of a console block that are for the shell, without their prompts."""
    found: list[str] = []
    for line in dedent(text).splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif found and found[-1].endswith("\\"):
            found.append(line)
    return found


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
    wrong = [*loaded_from_elsewhere(found), *broken(found), *misnamed(found), *ill_copied(SITE), *unfound(SITE)]
    sys.exit("\n".join(wrong) if wrong or not found else None)
