"""A port for a server of a test."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def nobody_listening() -> Iterator[int]:
    """Give a port whose connections are refused, and which nobody else takes within this block."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
