"""How a page shows a finding of the doctor: what it means in words, and links to what it names and to its page."""

import re
from collections.abc import Collection, Mapping

from markupsafe import Markup, escape

# Where something can be seen of a finding, and done about it. The others have the doctor's page.
PAGES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("M022", "M023", "M024", "M025", "M026", "M027", "M053"), ("/workers", "Workers")),
    "M040": ("/parked", "Parked keys"),
    "M041": ("/dead-letters", "Dead letters"),
    "M043": ("/inboxes", "Inboxes"),
    **dict.fromkeys(("M044", "M046"), ("/links", "Links and bridges")),
    "M045": ("/failing", "Failing keys"),
    **dict.fromkeys(("M054", "M055", "M056"), ("/logs", "Logs")),
}
NAMED = re.compile(r"\binbox ([a-z][a-z0-9_]*)")
CODE = re.compile(r"`([^`]+)`")


def page_of(id: str) -> tuple[str, str]:
    """Return the path of the page about a finding, and its name."""
    return PAGES.get(id, ("/doctor", "Doctor"))


def linked(line: str, base: str, inboxes: Collection[str]) -> Markup:
    """Return a line of evidence, in which the `inboxes` that there are lead to their pages."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f'inbox <a href="{escape(base)}/inboxes/{name}">{name}</a>' if name in inboxes else match[0]

    return Markup(NAMED.sub(link, str(escape(line))))  # noqa: S704


def worded(text: str) -> Markup:
    """Return a text of `mailroom explain`, with what stands in backticks as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704
