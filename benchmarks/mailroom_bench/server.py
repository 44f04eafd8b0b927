"""The server that is measured if none is given: embedded, durable, with the memory of a small production server."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from mailroom.embedded import Server, default_directory, find_binaries

# fsync and synchronous_commit stay on, their defaults. The rest keeps a checkpoint from falling into only one side of a
# comparison.
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "1h", "max_connections": "100"}


@contextmanager
def durable_server() -> Iterator[str]:
    """Start a server beside the user's embedded one; yield its DSN, and remove it afterwards."""
    binaries = find_binaries()
    directory = default_directory(binaries.major).with_name(f"bench{binaries.major}")
    server = Server(directory, binaries=binaries, settings=SETTINGS)
    server.start()
    try:
        yield server.dsn()
    finally:
        # Its WAL grows to gigabytes, so it is removed, unless another run uses it.
        if server.stop():
            shutil.rmtree(directory)
