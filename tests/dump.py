"""`tests/schema`: the schema of each released revision and of the newest one, as pg_dump writes it.

A change of the schema is so reviewed as SQL, and upgrades begin at what a release had. `python -m tests.dump` writes
the file of the newest revision.
"""

import re
import subprocess
from pathlib import Path

from mailroom.embedded import Binaries, find_binaries
from mailroom.schema import HEAD
from tests.support.databases import Databases
from tests.support.postgres import Servers, run_directory

FILES = Path(__file__).parent / "schema"
MAJOR = 18  # versions of PostgreSQL write a schema differently
# Of each version that was released: the revision of its schema. Its file stays.
RELEASED: dict[str, str] = {}

# Titles, settings of the session, and what differs from run to run.
LEFT_OUT = re.compile(
    r"^(?:--\n-- (?:Name: |PostgreSQL ).*\n--|-- Dumped .*|\\(?:un)?restrict .*|SET .*;"
    r"|SELECT pg_catalog\.set_config\('search_path'.*)\n",
    re.MULTILINE,
)


def dump(binaries: Binaries, dsn: str) -> str:
    """Return the schema `mailroom` of a database as SQL."""
    command = [str(binaries.path / "pg_dump"), "--schema-only", "--no-owner", "--schema=mailroom", dsn]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\n{3,}", "\n\n", LEFT_OUT.sub("", text)).strip() + "\n"


def main() -> None:
    """Write the file of the newest revision."""
    with run_directory() as directory:
        servers = Servers(directory)
        databases = Databases(servers.dsn(MAJOR), "dump")
        text = dump(find_binaries(MAJOR), databases.create(migrated=True))
        databases.drop_all()
        databases.close()
        servers.stop()
    (FILES / f"{HEAD}.sql").write_text(text)


if __name__ == "__main__":
    main()
