"""The PostgreSQL servers of a test run: private ones, fast and not durable, shared by all its workers.

The process that runs pytest makes one directory for the run. Each worker uses the servers in it, starting one when a
test first needs it, and the last to finish stops it. What a killed run left behind is cleared away by the next one.
"""

import fcntl
import hashlib
import hmac
import os
import shutil
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from mailroom.embedded import SUPPORTED_MAJORS, Server, find_binaries
from mailroom.errors import EmbeddedServerError

FAST_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    # Our processes turn jit off. A test's own session does not, and 15 compiled one statement for up to 50 s.
    "jit_above_cost": "-1",
}

_PREFIX = "mailroom-tests-"
_RUN_LOCK = "run.lock"
_MEMORY = Path("/dev/shm")
_MEMORY_NEEDED = 4 * 1024**3


class Servers:
    """The servers of one worker, by major version."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: dict[int, Server] = {}

    def dsn(self, major: int) -> str:
        """Return the DSN of the maintenance database of a running server."""
        if major not in self._servers:
            server = Server(self._directory / f"pg{major}", binaries=find_binaries(major), settings=FAST_SETTINGS)
            server.start()
            self._servers[major] = server
            _make_logins_quick(server.dsn("postgres"))
        return self._servers[major].dsn("postgres")

    def stop(self) -> None:
        """Cease to use the servers; those that no other worker uses stop."""
        while self._servers:
            self._servers.popitem()[1].stop()


def _make_logins_quick(dsn: str) -> None:
    """Have the password sent as it is, and verified in one step and not in 4,096 (RFC 5802).

    These take 5 ms of each connection, and a test makes three. Every driver can send it so.
    """
    password = str(conninfo_to_dict(dsn)["password"]).encode()
    salt = os.urandom(16)
    salted = hashlib.pbkdf2_hmac("sha256", password, salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    parts = (b64encode(part).decode() for part in (salt, stored, hmac.digest(salted, b"Server Key", "sha256")))
    verifier = "SCRAM-SHA-256$1:{}${}:{}".format(*parts)
    with psycopg.connect(dsn) as connection:
        # Each worker does it; two at the same time would fail.
        connection.execute("LOCK TABLE pg_authid IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(sql.SQL("ALTER ROLE CURRENT_USER PASSWORD {}").format(verifier))
        rules = Path(*connection.execute("SHOW hba_file").fetchone() or ())
        rules.write_text(rules.read_text().replace("scram-sha-256", "password"))
        connection.execute("SELECT pg_reload_conf()")


def available_majors() -> list[int]:
    """Return the major versions this machine can run, the newest first."""
    return [major for major in reversed(SUPPORTED_MAJORS) if _is_available(major)]


def _is_available(major: int) -> bool:
    try:
        find_binaries(major)
    except EmbeddedServerError:
        return False
    return True


def _home() -> Path:
    """Where runs have their directories: in memory if there is room, since each test copies a database of 9 MB."""
    in_memory = "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK)
    if in_memory and shutil.disk_usage(_MEMORY).free >= _MEMORY_NEEDED:
        return _MEMORY
    return Path(tempfile.gettempdir())


@contextmanager
def run_directory() -> Iterator[Path]:
    """Make the directory of a run, and stop the servers in it and remove it at the end."""
    home = _home()
    for left_behind in home.glob(f"{_PREFIX}*"):
        _clear_if_abandoned(left_behind)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
    directory.chmod(0o755)  # root's servers run as another account
    lock = os.open(directory / _RUN_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
        remove_with_servers(directory)
    finally:
        os.close(lock)


def remove_with_servers(directory: Path) -> None:
    """Stop the servers below `directory` and remove it; fail if one of them is still used."""
    still_used = _stop_servers(directory)
    assert not still_used, f"servers that some test did not stop: {', '.join(map(str, still_used))}"
    shutil.rmtree(directory)


def _stop_servers(directory: Path) -> list[Path]:
    """Stop the servers below `directory` and return those that somebody else uses."""
    return [lock.parent for lock in directory.rglob("start.lock") if not Server(lock.parent).end()]


def _clear_if_abandoned(directory: Path) -> None:
    try:
        lock = os.open(directory / _RUN_LOCK, os.O_RDWR)
    except OSError:  # somebody else's, or just being made or removed
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _stop_servers(directory):
            shutil.rmtree(directory, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):  # its run goes on, or another run clears it too
        return
    finally:
        os.close(lock)
