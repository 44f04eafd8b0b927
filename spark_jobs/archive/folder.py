"""Where a drain puts its files: a directory of this machine, or of a store that pyarrow knows."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from pyarrow import ArrowInvalid, fs

from mailroom.errors import ConfigurationError

URI = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*):(?=/)"
    r"(?://(?:(?P<user>[^/?]*)@)?(?P<host>[^/?]*))?(?P<path>[^?]*)(?P<query>\?.*)?",
    re.IGNORECASE | re.DOTALL,
)
HOST = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")  # so that what stands behind a colon is a port, and no password
SECRET = re.compile(r"[?&;][^=&;]*(key|secret|token|password|sig|%)", re.IGNORECASE)  # in the names of a query
ALIASES = {"s3a": "s3"}  # what Hadoop calls a store, and what pyarrow does
CONTAINERS = ("abfs", "abfss")  # whose user is no user


class Folder(Protocol):
    """A directory: files in it are written under one name, made durable, and then given another."""

    def make(self) -> None:
        """Make the directory, if it is not there."""

    def create(self, name: str) -> IO[bytes]:
        """Open a new file to write."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read."""

    def seal(self, file: IO[bytes]) -> None:
        """Close a written file; once this has returned, it outlives a crash of the machine."""

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, durably. Raises `FileNotFoundError` if there is none."""

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there; the names that are left are durable."""

    def starting_with(self, prefix: str) -> Iterator[str]:
        """Give the names that begin so."""


class LocalFolder:
    """A directory of this machine, or one that it has mounted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        """See `Folder.make`."""
        missing = [each for each in (self._path, *self._path.parents) if not each.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync(made.parent)

    def create(self, name: str) -> IO[bytes]:
        """See `Folder.create`."""
        return (self._path / name).open("xb")

    def open(self, name: str) -> IO[bytes]:
        """See `Folder.open`."""
        return (self._path / name).open("rb")

    def seal(self, file: IO[bytes]) -> None:
        """See `Folder.seal`."""
        with file:
            file.flush()
            os.fsync(file.fileno())
        _sync(self._path)

    def rename(self, name: str, to: str) -> None:
        """See `Folder.rename`."""
        (self._path / name).rename(self._path / to)
        _sync(self._path)

    def has(self, name: str) -> bool:
        """See `Folder.has`."""
        return (self._path / name).exists()

    def delete(self, name: str) -> None:
        """See `Folder.delete`."""
        (self._path / name).unlink(missing_ok=True)
        _sync(self._path)

    def starting_with(self, prefix: str) -> Iterator[str]:
        """See `Folder.starting_with`."""
        return (name for name in os.listdir(self._path) if name.startswith(prefix))


def _sync(directory: Path) -> None:
    # A name is kept by its directory, whose own fsync makes it durable.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoreFolder:
    """A directory of HDFS or of an object store, where a file that was closed is durable."""

    def __init__(self, system: fs.FileSystem, path: str) -> None:
        self._system = system
        self._path = path

    def make(self) -> None:
        """See `Folder.make`."""
        self._system.create_dir(self._path, recursive=True)

    def create(self, name: str) -> IO[bytes]:
        """See `Folder.create`."""
        stream: IO[bytes] = self._system.open_output_stream(self._at(name), compression=None)
        return stream

    def open(self, name: str) -> IO[bytes]:
        """See `Folder.open`."""
        file: IO[bytes] = self._system.open_input_file(self._at(name))
        return file

    def seal(self, file: IO[bytes]) -> None:
        """See `Folder.seal`."""
        file.close()

    def rename(self, name: str, to: str) -> None:
        """See `Folder.rename`; an object store copies it and deletes the old one."""
        if not self.has(name):  # what a store says of a missing one differs from store to store
            raise FileNotFoundError(name)
        self._system.move(self._at(name), self._at(to))

    def has(self, name: str) -> bool:
        """See `Folder.has`."""
        found: Any = self._system.get_file_info(self._at(name))
        return bool(found.type != fs.FileType.NotFound)

    def delete(self, name: str) -> None:
        """See `Folder.delete`."""
        if self.has(name):
            self._system.delete_file(self._at(name))

    def starting_with(self, prefix: str) -> Iterator[str]:
        """See `Folder.starting_with`."""
        found = self._system.get_file_info(fs.FileSelector(self._path))
        return (each.base_name for each in found if each.base_name.startswith(prefix))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


def full_name(directory: str) -> str:
    """Return a directory's path or URI as it means the same from everywhere, the same for each way to write it.

    Raises `ConfigurationError` for one that is empty, or holds a password or key: it is kept in the database.
    """
    if not directory:
        raise ConfigurationError("The directory is empty. Give a path, or a URI of file, s3, gs, abfs or hdfs.")
    uri = URI.fullmatch(directory)
    if uri is None:
        return str(Path(directory).resolve())
    user, query = uri["user"] or "", uri["query"] or ""
    if ":" in user or not HOST.fullmatch(uri["host"] or "") or SECRET.search(query):
        raise ConfigurationError(
            "The directory's URI holds a password or a key. Leave it out and let the environment have it, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    scheme = uri["scheme"].lower()
    if scheme == "file":
        _, path = _opened(directory)
        return str(Path(path).resolve())
    return f"{ALIASES.get(scheme, scheme)}://{_authority(uri)}{uri['path'].rstrip('/')}{query}"


def spark_name(directory: str) -> str:
    """Return the directory of a `full_name` as Spark spells it.

    A query is for pyarrow: Spark has regions and endpoints in its configuration.
    """
    uri = URI.fullmatch(directory)
    if uri is None:
        return f"file://{directory}"  # a bare path would be one of the cluster's default file system
    schemes = {ours: hadoops for hadoops, ours in ALIASES.items()}
    return f"{schemes.get(uri['scheme'], uri['scheme'])}://{_authority(uri)}{uri['path']}"


def shown(directory: str) -> str:
    """Return the directory as it may stand in an error or a log: of a URI neither user nor query."""
    uri = URI.fullmatch(directory)
    if uri is None:
        return directory
    container = f"{uri['user'].split(':')[0]}@" if uri["user"] and uri["scheme"].lower() in CONTAINERS else ""
    return f"{uri['scheme']}://{container}{uri['host'] or ''}{uri['path']}"


def _authority(uri: re.Match[str]) -> str:
    return (f"{uri['user']}@" if uri["user"] else "") + (uri["host"] or "")


def folder(directory: str) -> Folder:
    """Open a directory by its `full_name`. Raises `ConfigurationError`, and `OSError`."""
    system, path = _opened(directory)
    return LocalFolder(Path(path)) if isinstance(system, fs.LocalFileSystem) else StoreFolder(system, path)


def _opened(directory: str) -> tuple[fs.FileSystem, str]:
    try:
        system, path = fs.FileSystem.from_uri(directory)
    except ArrowInvalid:
        raise ConfigurationError(
            f"{shown(directory)} names no directory. Give a path, or a URI of file, s3, gs, abfs or hdfs."
        ) from None
    return system, path
