"""Where a drain puts its files: a directory of this machine, or of a store that pyarrow knows."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, urlsplit

from pyarrow import ArrowInvalid, fs

from mailroom.errors import ConfigurationError

URI = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
SECRET = re.compile(r"[?&;][^=&;]*(key|secret|token|password|sig|%)", re.IGNORECASE)  # in the names of a query
CONTAINERS = ("abfs", "abfss")  # whose user is a container


class Folder:
    """A directory: files in it are written under one name, made durable, and then given another.

    A store keeps what was closed and renamed; what is on this machine is also synced.
    """

    def __init__(self, system: fs.FileSystem, path: str) -> None:
        self._system = system
        self._path = path
        self._is_local = isinstance(system, fs.LocalFileSystem)

    def make(self) -> None:
        """Make the directory, if it is not there."""
        path = Path(self._path)
        missing = [each for each in (path, *path.parents) if self._is_local and not each.exists()]
        self._system.create_dir(self._path, recursive=True)
        for made in missing:
            _sync(made.parent)

    def create(self, name: str) -> IO[bytes]:
        """Open a new file to write."""
        file: IO[bytes] = self._system.open_output_stream(self._at(name), compression=None)
        return file

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read."""
        file: IO[bytes] = self._system.open_input_file(self._at(name))
        return file

    def seal(self, name: str, file: IO[bytes]) -> None:
        """Close a file that was written; once this has returned, it outlives a crash of the machine."""
        if not self._is_local:
            file.close()
            return
        with open(self._at(name), "rb") as same:  # before the close: it then learns of all errors of writing
            file.close()
            os.fsync(same.fileno())
        self._sync()

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, durably. Raises `FileNotFoundError` if there is none."""
        if not self.has(name):  # each store has its own error for a missing file
            raise FileNotFoundError(name)
        self._system.move(self._at(name), self._at(to))
        self._sync()

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return bool(self._system.get_file_info(self._at(name)).type != fs.FileType.NotFound)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there; the names that are left are durable."""
        if self.has(name):
            self._system.delete_file(self._at(name))
        self._sync()

    def starting_with(self, prefix: str) -> Iterator[str]:
        """Give the names that begin so."""
        found = self._system.get_file_info(fs.FileSelector(self._path))
        return (each.base_name for each in found if each.base_name.startswith(prefix))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _sync(self) -> None:
        if self._is_local:
            _sync(Path(self._path))


def _sync(directory: Path) -> None:
    # A name is kept by its directory, whose own fsync makes it durable.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder(directory: str) -> Folder:
    """Open a directory by its `full_name`. Raises `ConfigurationError`, and `OSError`."""
    return Folder(*_opened(directory))


def full_name(directory: str) -> str:
    """Return a directory's path or URI so that it means the same from everywhere, however it was written.

    Raises `ConfigurationError` for one that is empty, or holds a password or key: it is kept in the database.
    """
    if not directory:
        raise ConfigurationError(
            "The directory is empty. Give a path, or a URI of file, s3, gs, abfs or hdfs.", code="MR-invalid-directory"
        )
    uri = _uri(directory)
    if uri is None:
        return str(Path(directory).resolve())
    if _holds_secret(uri):
        raise ConfigurationError(
            "The directory's URI holds a password or a key. Leave it out and let the environment have it, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
            code="MR-password-shown",
        )
    if uri.scheme == "file":
        return str(Path(_opened(directory)[1]).resolve())
    scheme = "s3" if uri.scheme == "s3a" else uri.scheme
    return f"{scheme}://{uri.netloc}{uri.path.rstrip('/')}{uri.query and '?'}{uri.query}"


def spark_name(directory: str) -> str:
    """Return the directory of a `full_name` as Spark writes it; regions and endpoints are in Spark's configuration."""
    uri = _uri(directory)
    if uri is None:
        return f"file://{directory}"  # a bare path would be one of the cluster's default file system
    return f"{'s3a' if uri.scheme == 's3' else uri.scheme}://{uri.netloc}{uri.path}"


def shown(directory: str) -> str:
    """Return the directory as it may stand in an error or a log: without the user and the query of a URI."""
    uri = _uri(directory)
    if uri is None:
        return directory
    container = f"{uri.username}@" if uri.username and uri.scheme in CONTAINERS else ""
    return f"{uri.scheme}://{container}{uri.netloc.rpartition('@')[2]}{uri.path}"


def _uri(directory: str) -> SplitResult | None:
    if not URI.match(directory):
        return None
    try:
        return urlsplit(directory, allow_fragments=False)
    except ValueError:
        raise _no_directory("The URI") from None


def _holds_secret(uri: SplitResult) -> bool:
    try:
        _ = uri.port
    except ValueError:  # a password with a slash in it: what stands before that is not a port
        return True
    return uri.password is not None or bool(SECRET.search(f"?{uri.query}"))


def _opened(directory: str) -> tuple[fs.FileSystem, str]:
    try:
        system, path = fs.FileSystem.from_uri(directory)
    except ArrowInvalid:
        raise _no_directory(shown(directory)) from None
    return system, path


def _no_directory(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} names no directory. Give a path, or a URI of file, s3, gs, abfs or hdfs.", code="MR-invalid-directory"
    )
