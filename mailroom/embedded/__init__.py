"""A PostgreSQL of our own for the demo, the benchmarks, `--embedded` and the tests: found, started and stopped here.

No command falls back to it silently. It listens on 127.0.0.1 only and asks for a password kept beside its data.
"""

from mailroom.embedded.binaries import SUPPORTED_MAJORS, Binaries, find_binaries
from mailroom.embedded.server import Condition, Server, default_directory, embedded_server

__all__ = [
    "SUPPORTED_MAJORS",
    "Binaries",
    "Condition",
    "Server",
    "default_directory",
    "embedded_server",
    "find_binaries",
]
