"""Where a drain puts its files: a directory of this machine, or of a store that pyarrow knows."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from pyarrow import ArrowInvalid, fs

from mailroom.errors import ConfigurationError


class Folder(Protocol):
    """A directory: files in it are written under one name, made durable, and then given another."""

    def make(self) -> None:
        """Make the directory, if it is not there."""

    def create(self, name: str) -> IO[bytes]:
        """Open a new file to write."""

    def seal(self, file: IO[bytes]) -> None:
        """Close a written file; once this has returned, it outlives a crash of the machine."""

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, durably. Raises `FileNotFoundError` if there is none."""

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

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
    """Return a directory's path or URI as it means the same from everywhere.

    Raises `ConfigurationError` for one that holds a password: it is kept in the database.
    """
    if "://" not in directory:
        return str(Path(directory).absolute())
    if urlsplit(directory).password is not None:
        raise ConfigurationError(
            "The directory's URI holds a password. Leave it out and let the environment have it, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return directory.rstrip("/")


def folder(directory: str) -> Folder:
    """Open a directory by its `full_name`. Raises `ConfigurationError`, and `OSError`."""
    try:
        system, path = fs.FileSystem.from_uri(directory)
    except ArrowInvalid:
        raise ConfigurationError(
            f"{directory} names no directory. Give a path, or a URI of file, s3, gs, abfs or hdfs."
        ) from None
    return LocalFolder(Path(path)) if isinstance(system, fs.LocalFileSystem) else StoreFolder(system, path)
