"""The operating system account that the server runs as, and what it can reach."""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from mailroom.errors import EmbeddedServerError


@dataclass(frozen=True)
class Account:
    """The account of the server's processes; `switched` if it is not the caller's own."""

    name: str
    uid: int
    gid: int
    switched: bool

    def can_reach(self, path: Path) -> bool:
        """Return whether this account may pass through every existing folder above `path`."""
        return not self.switched or all(
            self._may_pass(folder.stat()) for folder in path.resolve().parents if folder.exists()
        )

    def _may_pass(self, folder: os.stat_result) -> bool:
        if folder.st_uid == self.uid:
            return bool(folder.st_mode & stat.S_IXUSR)
        if folder.st_gid == self.gid:
            return bool(folder.st_mode & stat.S_IXGRP)
        return bool(folder.st_mode & stat.S_IXOTH)


def server_account() -> Account:
    """Return the caller's own account; for root, as which PostgreSQL refuses to run, `postgres`, else `nobody`."""
    uid = os.geteuid()
    if uid != 0:
        try:
            own = pwd.getpwuid(uid)
        except KeyError:
            # initdb would say only "could not look up effective user ID"; seen with `docker run -u 54321`.
            raise EmbeddedServerError(
                f"User id {uid} has no entry in the password database, and PostgreSQL refuses to run without one: "
                "run as a user that has an entry, or set MAILROOM_DSN to a server of your own.",
                code="MR-embedded-account",
            ) from None
        return Account(own.pw_name, own.pw_uid, own.pw_gid, switched=False)
    for name in ("postgres", "nobody"):
        try:
            other = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(other.pw_name, other.pw_uid, other.pw_gid, switched=True)
    raise EmbeddedServerError(
        "PostgreSQL refuses to run as root, and there is no account `postgres` or `nobody` to run it as: "
        "run as another user, or set MAILROOM_DSN to a server of your own.",
        code="MR-embedded-account",
    )
