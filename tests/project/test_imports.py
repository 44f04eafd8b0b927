"""What an import of Mailroom costs a program: how many modules, and of whom. Seconds would say more of the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"mailroom", "outbox", "inbox", "dispatcher", "spark_jobs"}
# What a message needs: a codec, a driver, a calendar.
LIGHT = {"cbor2", "cronsim", "msgspec", "psycopg", "psycopg_binary", "psycopg_pool", "typing_extensions"}
# Room for what is added, and none for what drags in a part of Mailroom that the program does not use: 9, 20, 51, 76,
# 126.
# `outbox` and `inbox` import their names when they are asked for, so the cases name the modules that have these.
CASES = [
    pytest.param(["mailroom"], set(), 12, id="mailroom"),
    # It hands rows on, and what they mean is asked of them later: so it needs no codec and no driver.
    pytest.param(["inbox.by_key.claim"], set(), 22, id="a claim"),
    pytest.param(["outbox.outbox"], LIGHT, 65, id="writers"),
    # What a worker process of Spark uses to read an inbox. All of `inbox`, with SQLAlchemy, took it two thirds longer.
    pytest.param(["inbox.order", "inbox.sessions.wakeup"], LIGHT, 91, id="readers"),
    # SQLAlchemy is looked at for what a worker is given as its source.
    pytest.param(
        ["mailroom", "outbox.outbox", "inbox.inbox", "inbox.worker.worker"],
        LIGHT | {"sqlalchemy"},
        156,
        id="writers and consumers",
    ),
]
TOLD = """
import json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    __import__(name)
files = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before}
print(json.dumps({name: file for name, file in files.items() if file}))
"""


def imported(*names: str) -> dict[str, str]:
    """Return the modules that are imported with these, and their files; those of Python itself are left out."""
    ran = subprocess.run(
        [sys.executable, "-c", TOLD, *names], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, str] = json.loads(ran.stdout)
    return {name: file for name, file in found.items() if str(ROOT) in file or "site-packages" in file}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "others", "most"), CASES)
def test_import_brings_few_modules_and_no_library_that_only_a_command_or_a_migration_needs(
    names: list[str], others: set[str], most: int
) -> None:
    top = [name.partition(".")[0] for name in imported(*names)]
    assert {name for name in top if not name.startswith("_")} - OURS <= others
    assert len([name for name in top if name in OURS]) <= most
