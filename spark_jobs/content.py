"""What a batch holds, as a number and 16 bytes: the same for the same rows, whatever tasks have them in what order."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pyarrow as pa

BYTES = 16


@dataclass(frozen=True, slots=True)
class Content:
    """How many rows, and the sum of their hashes, which no order changes: two sums of 64 bits each, without carry."""

    messages: int = 0
    digest: bytes = bytes(BYTES)

    @classmethod
    def of(cls, rows: pa.LargeBinaryArray) -> "Content":
        """Return the content of rows, each given as its bytes."""
        hashes = b"".join([blake2b(row, digest_size=BYTES).digest() for row in rows.to_pylist()])
        return cls(len(rows), _sum(hashes))

    def __add__(self, other: "Content") -> "Content":
        return Content(self.messages + other.messages, _sum(self.digest + other.digest))

    def under(self, heading: str) -> "Content":
        """Return the content of these rows under a heading: what they are called, and what goes for all of them."""
        return Content(self.messages, blake2b(heading.encode() + self.digest, digest_size=BYTES).digest())


def _sum(hashes: bytes) -> bytes:
    halves = np.frombuffer(hashes, "<u8").reshape(-1, 2)
    return bytes(halves.sum(axis=0, dtype="<u8").tobytes())
