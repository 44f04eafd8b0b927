"""The embedded server as its users see it: where it lives, who starts it and who stops it.

Its folder holds the cluster, two lock files and perhaps a mark:

- `start.lock` is locked exclusively while a process starts or stops the server, so two processes start only one.
- `users.lock` is locked in shared mode by every user of the server. The last one to release it stops the server. The
  kernel releases it when its holder dies, so there is no wait for a user that was killed.
- `kept` exists while the server is to run without users. It survives a crash and a restart of the machine: the next
  user starts the server again, and it stays up.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import platformdirs

from mailroom.embedded.account import Account, server_account
from mailroom.embedded.binaries import CHOSEN, SUPPORTED_MAJORS, Binaries, find_binaries, runnable
from mailroom.embedded.cluster import DATABASE, Cluster
from mailroom.errors import EmbeddedServerError

_START_LOCK = "start.lock"
_USERS_LOCK = "users.lock"
_KEPT = "kept"
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
    """Return the user's own server, not yet started: durable, and its data survives restarts.

    It is the one that runs, or else the one that has data, whatever PostgreSQL this installation has: programs of
    different virtual environments meet in one database. Of several it is the newest. $MAILROOM_PG_BIN chooses another.
    """
    if not os.environ.get(CHOSEN):
        servers = [Server(default_directory(major)) for major in reversed(SUPPORTED_MAJORS)]
        with_data = [server for server in servers if server.has_data()]
        for server in [*filter(Server.runs, with_data), *with_data][:1]:
            return server
    binaries = find_binaries()
    return Server(default_directory(binaries.major), binaries=binaries)


@dataclass(frozen=True)
class Condition:
    """The condition of a server: URL and port if it runs, whether it is kept, whether it is used, its folder's size."""

    dsn: str | None = field(repr=False)  # with the password
    port: int | None
    is_kept: bool
    is_used: bool
    bytes: int


class Server:
    """A PostgreSQL server of our own in `directory`, which is created if it is missing. Usable as a context manager.

    Without `binaries` it runs those of its data's major version; without data, what `find_binaries` returns. `settings`
    are PostgreSQL's; they apply if this object starts the server, not if it finds it running. With fsync off, the first
    start does not wait for the disk either; otherwise the server is durable.

    Several processes, and several objects in one process, may use one directory at the same time: they share the
    running server. It stops when the last of them calls `stop`, unless one has called `keep`. If the last one was
    killed, the server runs until another user has used and stopped it. For root, the server runs as `postgres` or
    `nobody`: then the folder belongs to that account, which must be able to reach it.
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

        Calling it again is harmless. After a crash it starts the server again, on the same port if that is free.
        Raises `EmbeddedServerError`, with the end of the server's log, if it cannot run.
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

    def keep(self) -> bool:
        """Start the server, and let it run without users until `end`. Return whether it was not kept before."""
        self.start()
        with _os_errors_explained(self.directory), self._alone():
            new = not self._is_kept()
            os.close(self._open(_KEPT))
            return new

    def stop(self) -> bool:
        """Stop using the server, and stop it unless it is kept or has other users. Return whether it is down now."""
        return self._stop(keep=True)

    def end(self) -> bool:
        """Do not keep the server any longer, and `stop`."""
        return self._stop(keep=False)

    def has_data(self) -> bool:
        """Return whether the server has been started here before."""
        with _os_errors_explained(self.directory):
            return self._cluster.major() is not None

    def runs(self) -> bool:
        """Return whether the server runs, for any user of it. Waits for one that is starting or stopping."""
        with _os_errors_explained(self.directory), self._alone():
            return self._cluster.wait_until_ready() is not None

    def condition(self) -> Condition | None:
        """Return the condition of the server without using it; None if it has never been started here."""
        with _os_errors_explained(self.directory):
            if not (self.directory / _START_LOCK).exists():
                return None
            with self._alone():
                port = self._cluster.wait_until_ready()
                dsn = None if port is None else self._cluster.dsn(port, DATABASE)
                return Condition(dsn, port, self._is_kept(), self._has_users(), self._cluster.size())

    def dsn(self, database: str = DATABASE) -> str:
        """Return the URL of a database of the started server, password included. `mailroom` exists from the start."""
        return self._cluster.dsn(self._started(), database)

    def database(self, name: str) -> str:
        """Return the URL of a database of the started server, which is created if it is missing."""
        self._cluster.make_database(self._started(), name)
        return self.dsn(name)

    def _started(self) -> int:
        if self._port is None:
            raise EmbeddedServerError(
                f"The embedded server in {self.directory} is not started: call start() first.",
                code="MR-embedded-not-started",
            )
        return self._port

    def _stop(self, *, keep: bool) -> bool:
        with _os_errors_explained(self.directory):
            if not (self.directory / _START_LOCK).exists():
                return True
            with self._alone():
                self._leave_users()
                if not keep:
                    (self.directory / _KEPT).unlink(missing_ok=True)
                if self._is_kept() or self._has_users():
                    return False
                self._cluster.shut_down()
                return True

    def _choose_binaries(self) -> Binaries:
        major = self._cluster.major()
        try:
            binaries = self._binaries or find_binaries(major)
        except EmbeddedServerError as error:
            if major is None:
                raise
            raise EmbeddedServerError(
                f"{self.directory} holds data of PostgreSQL {major}. {error} To begin anew, name another directory by "
                "MAILROOM_HOME.",
                code="MR-embedded-other-version",
            ) from None
        if major not in (None, binaries.major):
            raise EmbeddedServerError(
                f"{self.directory} holds data of PostgreSQL {major}, which PostgreSQL {binaries.major} cannot read: "
                f"use another directory, or set MAILROOM_PG_BIN to a PostgreSQL {major}.",
                code="MR-embedded-other-version",
            )
        return binaries

    def _prepare_directory(self, account: Account) -> None:
        if not account.can_reach(self.directory):
            raise EmbeddedServerError(
                f"{self.directory} lies in a folder closed to the user {account.name}, as whom the server has to run: "
                "use another directory, for instance by MAILROOM_HOME.",
                code="MR-embedded-folder-closed",
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
                f"{self.directory} is not empty and holds no embedded server: use another directory.",
                code="MR-embedded-directory",
            )
        owner = self.directory.stat().st_uid
        if owner != account.uid:
            raise EmbeddedServerError(
                f"{self.directory} belongs to user id {owner}, and the server would run as {account.name} "
                f"({account.uid}): use another directory, or start it as its owner.",
                code="MR-embedded-directory",
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = self._open(_START_LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _open(self, name: str) -> int:
        return os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def _is_kept(self) -> bool:
        return (self.directory / _KEPT).exists()

    def _join_users(self) -> None:
        if self._use is None:
            self._use = self._open(_USERS_LOCK)
            fcntl.flock(self._use, fcntl.LOCK_SH)

    def _leave_users(self) -> None:
        if self._use is not None:
            # Explicitly: a process forked meanwhile has a copy of this descriptor, which would keep the lock.
            fcntl.flock(self._use, fcntl.LOCK_UN)
            os.close(self._use)
            self._use = None

    def _has_users(self) -> bool:
        """Return whether the server has any users, including this object."""
        lock = self._open(_USERS_LOCK)
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
            "Use another one, for instance by MAILROOM_HOME.",
            code="MR-embedded-directory",
        ) from error
