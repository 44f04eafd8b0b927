"""`mailroom explain`: what a page says of an error's code, and what a finding of the doctor means."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click

from mailroom.cli.output import say
from mailroom.doctor.kinds import KINDS
from mailroom.errors.codes import CODES

# Most of the pages that they lead to are not installed.
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)[^)\s]*\)")
_PACKAGE = Path(__file__).parents[2]
_INSTALLED = _PACKAGE / "_errors"
PAGES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "docs" / "errors"


class Section(NamedTuple):
    """What one of the pages says of a code: what it means, why it comes, and what to do."""

    page: str
    text: str


def sections() -> Mapping[str, Section]:
    """Return what the pages say of each code."""
    return {
        code: Section(path.name, text.strip())
        for path in sorted(PAGES.glob("*.md"))
        for code, _, text in (part.partition("\n") for part in path.read_text(encoding="utf-8").split("\n## ")[1:])
    }


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Print what an error's CODE, or a finding of the doctor, means and what to do. Without CODE, list all.

    \b
    Examples:
      mailroom explain MR-inbox-in-use
      mailroom explain M001
    """
    if code is None:
        width = max(map(len, CODES))
        for each, summary in {**CODES, **{each: kind.what for each, kind in KINDS.items()}}.items():
            say(f"{each:{width}}  {summary}")
    elif code in KINDS:
        kind = KINDS[code]
        say(f"# {code}: {kind.what}\n\n{kind.means}\n\n{kind.remedy}")
    elif code in CODES:
        text = _LINK.sub(r"\1", sections()[code].text)
        say(f"# {code}\n\n{text}")
    else:
        near = difflib.get_close_matches(code, [*CODES, *KINDS])
        meant = f" Did you mean {', '.join(near)}?" if near else ""
        raise click.UsageError(f"There is no code {code}.{meant}")
