"""The embedded server as its users see it: where it lives, who starts it and who stops it.

Its folder holds the cluster and two lock files:

- `start.lock` is held exclusively while somebody starts or stops the server, so two processes at once start one.
- `users.lock` is held shared by everybody who uses the server. Whoever ceases to use it stops the server if nobody
  else holds that lock. The kernel lets go of it when its holder dies, so nobody waits for a user that was killed.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import platformdirs

from mailroom.embedded.account import Account, server_account
from mailroom.embedded.binaries import Binaries, find_binaries, runnable
from mailroom.embedded.cluster import Cluster
from mailroom.errors import EmbeddedServerError

_START_LOCK = "start.lock"
_USERS_LOCK = "users.lock"
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


def default_directory(major: int) -> Path:
    """Return where the user's embedded server of PostgreSQL `major` lives, such as ~/.local/share/mailroom/pg18.

    $MAILROOM_HOME replaces ~/.local/share/mailroom. Root's is /var/lib/mailroom: root's server runs as another
    account, which cannot enter root's home. Each major version has a folder, since none can read another's data.
    """
    home = os.environ.get("MAILROOM_HOME")
    if home:
        return Path(home).expanduser().absolute() / f"pg{major}"
    if os.geteuid() == 0:
        return Path("/var/lib/mailroom") / f"pg{major}"
    return platformdirs.user_data_path("mailroom", appauthor=False) / f"pg{major}"


def embedded_server() -> "Server":
    """Return the user's own server, not yet started: durable, and its data survives restarts."""
    binaries = find_binaries()
    return Server(default_directory(binaries.major), binaries=binaries)


class Server:
    """A PostgreSQL server of our own in `directory`, which is made if it is missing. Usable as a context manager.

    Without `binaries` it runs those of its data's major version, or with no data yet what `find_binaries` returns.
    `settings` are PostgreSQL's; they count when this object starts the server, not when it finds it running. With
    fsync off the first start does not wait for the disk either; the server is durable otherwise.

    Several processes, and several objects in one, may use one directory at the same time: they get the same running
    server, and it stops when the last of them calls `stop`. If that one was killed, the server runs on until somebody
    else uses it and stops. Root's server runs as `postgres` or `nobody`: then the folder belongs to that account, and
    must lie where it can reach it.
    """

    def __init__(
        self, directory: Path, *, binaries: Binaries | None = None, settings: Mapping[str, str] = _NO_SETTINGS
    ) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self._cluster = Cluster(self.directory)
        self._binaries = binaries
        self._settings = dict(settings)
        self._port: int | None = None
        self._use: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server if it is not running, and count as one of its users until `stop` or the end of the process.

        Calling it again is harmless, and after a crash of the server brings it back, on the same port if that is free.
        Raise `EmbeddedServerError`, with the end of the server's log, if it cannot run.
        """
        account = server_account()
        with _os_errors_explained(self.directory):
            self._prepare_directory(account)
            with self._alone():
                port = self._cluster.wait_until_ready()
                if port is None:
                    port = self._cluster.launch(runnable(self._choose_binaries(), account), account, self._settings)
                self._port = port
                self._join_users()

    def stop(self) -> bool:
        """Cease to use the server, and stop it unless somebody else uses it. Return whether it is down now."""
        with _os_errors_explained(self.directory):
            if not (self.directory / _START_LOCK).exists():
                return True
            with self._alone():
                self._leave_users()
                if self._has_users():
                    return False
                self._cluster.shut_down()
                return True

    def dsn(self, database: str = "mailroom") -> str:
        """Return the URL of a database of the started server, password included. `mailroom` exists from the start."""
        if self._port is None:
            raise EmbeddedServerError(f"The embedded server in {self.directory} is not started: call start() first.")
        return self._cluster.dsn(self._port, database)

    def _choose_binaries(self) -> Binaries:
        major = self._cluster.major()
        binaries = self._binaries or find_binaries(major)
        if major not in (None, binaries.major):
            raise EmbeddedServerError(
                f"{self.directory} holds data of PostgreSQL {major}, which PostgreSQL {binaries.major} cannot read: "
                f"use another directory, or set MAILROOM_PG_BIN to a PostgreSQL {major}."
            )
        return binaries

    def _prepare_directory(self, account: Account) -> None:
        if not account.can_reach(self.directory):
            raise EmbeddedServerError(
                f"{self.directory} lies in a folder closed to the user {account.name}, as whom the server has to run: "
                "use another directory, for instance by MAILROOM_HOME."
            )
        missing = [folder for folder in (self.directory, *self.directory.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            if account.switched:
                folder.chmod(0o755)  # whatever root's umask says, the server's account has to pass
        if not any(self.directory.iterdir()):
            self.directory.chmod(0o700)
            if account.switched:
                os.chown(self.directory, account.uid, account.gid)
        elif not (self.directory / _START_LOCK).exists():
            raise EmbeddedServerError(
                f"{self.directory} holds something else than an embedded server: use another directory."
            )
        owner = self.directory.stat().st_uid
        if owner != account.uid:
            raise EmbeddedServerError(
                f"{self.directory} belongs to user id {owner}, and the server would run as {account.name} "
                f"({account.uid}): use another directory, or start it as its owner."
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = self._open_lock(_START_LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _open_lock(self, name: str) -> int:
        return os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def _join_users(self) -> None:
        if self._use is None:
            self._use = self._open_lock(_USERS_LOCK)
            fcntl.flock(self._use, fcntl.LOCK_SH)

    def _leave_users(self) -> None:
        if self._use is not None:
            # Explicitly: a process forked meanwhile has a copy of this descriptor, which would keep the lock.
            fcntl.flock(self._use, fcntl.LOCK_UN)
            os.close(self._use)
            self._use = None

    def _has_users(self) -> bool:
        lock = self._open_lock(_USERS_LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


@contextmanager
def _os_errors_explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EmbeddedServerError(
            f"The embedded server's directory {directory} cannot be used: {error}. "
            "Use another one, for instance by MAILROOM_HOME."
        ) from error
