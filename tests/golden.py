"""tests/sql, the hot statements as psycopg sends them to the server: `python -m tests.golden` writes the files.

So whoever reviews a change of SQL sees it as SQL, also where the statement is put together from parts.
"""

import inspect
import re
import sys
from pathlib import Path

from mailroom.message.insert import Insert
from mailroom.sql.operation import Sql
from tests.support.hot import HOT, Hot

FILES = Path(__file__).parent / "sql"
ROOT = Path(__file__).parent.parent
PACKAGES = ("mailroom", "outbox", "inbox", "dispatcher")


def statements(content: dict[str, object]) -> dict[str, Sql]:
    """Return the statements of a module, by name."""
    found = {}
    for name, value in content.items():
        # By its type: isinstance also asks an object, and Django's settings, if another test has imported them, refuse.
        if not issubclass(type(value), Sql | tuple):
            continue
        for nth, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(each, Sql):
                found[name if each is value else f"{name}[{nth}]"] = each
            if isinstance(each, Insert):
                found |= {f"{name}.copy": each.copy, f"{name}.unnest": each.unnest}
    return found


def made_in(sql: Sql) -> str:
    """Return which constant of which file a statement is, and not where it is only imported."""
    for module, code in sorted(sys.modules.items()):
        if module.partition(".")[0] in PACKAGES:
            for name, each in statements(vars(code)).items():
                constant = re.split(r"[.[]", name)[0]
                if each is sql and re.search(rf"^{constant}\b[^\n(]* = ", inspect.getsource(code), re.MULTILINE):
                    return f"{name} in {Path(inspect.getfile(code)).relative_to(ROOT)}"
    raise AssertionError(f"no constant of the product: {sql.template}")


def golden(hot: Hot) -> str:
    """Return the content of a statement's file."""
    text, parameters = hot.at().numbered
    assert not re.search(rb"{[a-z_]+}", text), f"{made_in(hot.sql)} needs more names"
    lines = [f"-- {made_in(hot.sql)}"]
    if parameters:
        lines.append(f"-- {', '.join(f'${nth} {name}' for nth, name in enumerate(parameters, start=1))}")
    return "\n".join([*lines, text.decode(), ""])


def main() -> None:
    """Write all files anew, and remove those of statements that are gone."""
    FILES.mkdir(exist_ok=True)
    contents = {FILES / f"{name}.sql": golden(hot) for name, hot in HOT.items()}
    for left in FILES.glob("*.sql"):
        left.unlink()
    for file, content in contents.items():
        file.write_text(content)


if __name__ == "__main__":
    main()
