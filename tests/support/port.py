"""A port for a server of a test."""

import socket


def free_port() -> int:
    """Return a port that nobody listens at, and that nobody else is given for as long as this process lives.

    It stays bound here and is not listened at. So the system gives it to no other socket, not even to one that
    connects, while a server that asks for it may listen there: all of ours say that they reuse addresses.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    holder.detach()  # the file stays open
    return port
