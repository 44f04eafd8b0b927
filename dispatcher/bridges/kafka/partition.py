"""To which partition a record goes: always the same one of so many, also if it has no key.

Kafka's clients draw one for a record without a key, at each try anew. A repeat in another partition is no longer told
by its clock, and what comes behind a repeat for the first time is taken for one. So the message's id stands in for the
key.
"""

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from zlib import crc32

from mailroom.bridges.record import Record
from mailroom.errors import ConfigurationError

# D-bridges-10: A bridge chooses partitions itself, and the database knows of how many.
KEYS = 10_000  # whose hashes are kept: in Python some take 10 us
UINT32 = 0xFFFFFFFF
MULTIPLIER, ROTATION, SEED = 0x5BD1E995, 24, 0x9747B28C
PRIME, OFFSET = 0x01000193, 0x811C9DC5


def _murmur2(data: bytes) -> int:
    """Return the hash by which Java's clients choose."""
    size = len(data)
    hashed = SEED ^ size
    whole = size & ~3
    for word in struct.unpack(f"<{whole // 4}I", data[:whole]):
        mixed = (word * MULTIPLIER) & UINT32
        mixed = ((mixed ^ (mixed >> ROTATION)) * MULTIPLIER) & UINT32
        hashed = ((hashed * MULTIPLIER) & UINT32) ^ mixed
    if whole < size:
        hashed = ((hashed ^ int.from_bytes(data[whole:], "little")) * MULTIPLIER) & UINT32
    hashed = ((hashed ^ (hashed >> 13)) * MULTIPLIER) & UINT32
    return (hashed ^ (hashed >> 15)) & 0x7FFFFFFF


def _fnv1a(data: bytes) -> int:
    hashed = OFFSET
    for byte in data:
        hashed = ((hashed ^ byte) * PRIME) & UINT32
    return hashed if hashed < 2**31 else 2**32 - hashed


# By the names of the client's option `partitioner`. Those that end with _random draw one only without a key.
PARTITIONERS: Mapping[str, Callable[[bytes], int]] = {
    "murmur2_random": _murmur2, "murmur2": _murmur2, "consistent_random": crc32, "consistent": crc32,
    "fnv1a_random": _fnv1a, "fnv1a": _fnv1a,
}  # fmt: skip


def partitioner(bridge: str, name: str) -> Callable[[Record], int]:
    """Return what chooses the partition of a record by this option of the client. Raises `ConfigurationError`."""
    if name not in PARTITIONERS:
        raise ConfigurationError(
            f"Bridge {bridge}: partitioner is {name!r}, and a repeat has to go where the first try went: give one of "
            f"{', '.join(PARTITIONERS)}.",
            code="MR-bridge-options",
        )
    of_key = lru_cache(KEYS)(PARTITIONERS[name])
    return lambda record: (of_key(record.key) if record.key else crc32(record.id.bytes)) % record.parts
