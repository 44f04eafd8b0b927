"""The server that is measured when none is given: embedded, durable, with memory as a small production server has."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from mailroom.embedded import Server, default_directory, find_binaries

# fsync and synchronous_commit stay on, as PostgreSQL comes. The rest keeps a checkpoint from falling into one side of
# a comparison and not into the other.
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "1h", "max_connections": "100"}


@contextmanager
def durable_server() -> Iterator[str]:
    """Start a server of the benchmark's own beside the user's embedded one; give its DSN, and remove it afterwards."""
    binaries = find_binaries()
    directory = default_directory(binaries.major).with_name(f"bench{binaries.major}")
    server = Server(directory, binaries=binaries, settings=SETTINGS)
    server.start()
    try:
        yield server.dsn()
    finally:
        # Its log of writes grows to gigabytes, so nothing of it is kept; another run that uses it keeps it.
        if server.stop():
            shutil.rmtree(directory)
