"""docs/reference/errors.md, made from the list of codes: `python -m tests.error_index` writes it."""

from mailroom.cli.commands.explain import sections
from mailroom.errors.codes import CODES
from tests.support.pages import page_named

INDEX = page_named("errors.md")
INTRODUCTION = """\
# Errors and their codes

Every error that Mailroom raises has a code. The code stays the same if the text changes, so search for the
code, and compare it in programs:

```python
import os

import psycopg

from mailroom.errors import SchemaError
from mailroom.schema import check

with psycopg.connect(os.environ["MAILROOM_DSN"]) as conn:
    try:
        check(conn, schema="nowhere")
    except SchemaError as error:
        assert error.code == "MR-no-schema"
```

A code stands for one situation, and its page says what to do. One class of errors may have several codes: catch the
class for all of them, and compare `error.code` for one. The code is not part of `str(error)`. It is shown

- by the command, after the text: `mailroom: error: ... [MR-no-schema]`;
- by a traceback, in its last line;
- in the logs of workers and dispatchers, in the reason of parked keys and dead letters that failed with such an error,
  and in `mailroom link status`.

`mailroom explain MR-no-schema` prints what the page says of it, and `mailroom explain` lists all. Database errors in
your transaction reach you as your driver raises them, with an [SQLSTATE](https://www.postgresql.org/docs/current/errcodes-appendix.html).

| code | what it means |
|---|---|
"""


def index() -> str:
    """Return the page."""
    pages = {code: section.page for code, section in sections().items()}
    rows = (f"| [{code}](../errors/{pages[code]}#{code.lower()}) | {summary} |\n" for code, summary in CODES.items())
    return INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    INDEX.write_text(index())
