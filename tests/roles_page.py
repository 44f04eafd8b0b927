"""The tables of docs/operate/roles.md, made from the matrix: `python -m tests.roles_page` writes them."""

from mailroom.roles.matrix import PURPOSES, Right
from tests.support.pages import page_named

PAGE = page_named("roles.md")
BEGIN, END = "<!-- made by python -m tests.roles_page -->\n", "<!-- until here -->\n"


def tables() -> str:
    """Return what the page has between its two marks."""
    return "\n".join(
        f"### {purpose}\n\nA role that {about.about}.\n\n| on | privileges | why |\n|---|---|---|\n"
        + "".join(f"| {_on(right)} | {', '.join(right.privileges)} | {_why(right)} |\n" for right in about.rights)
        for purpose, about in PURPOSES.items()
    )


def _on(right: Right) -> str:
    return f"`{right.of}`" if right.kind == "table" else f"{right.kind} `{right.of}`"


def _why(right: Right) -> str:
    only = "only if it is in total order" if right.bounded else "only if it reads a log" if right.of_readers else ""
    return "; ".join(filter(None, (right.why, only)))


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2])
