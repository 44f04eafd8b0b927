"""What a batch holds, as a number and 24 bytes: the same for the same rows, in whatever order and tasks.

The first 8 bytes are of what was sent, so that an audit can compute them from delivered messages: the sum, without
carry, of the first 8 bytes of each message's SHA-256 (`HASH`). The others cover that and all else that rows have.
"""

from dataclasses import dataclass
from hashlib import blake2b, sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.arrow.byte_arrays import joined

# D-spark-8: The ledger compares a digest.
SUMS = 3  # of 64 bits each
SENT_BYTES = 8

# A message's topic, key and value are hashed. A key that only repeats the message's id counts as none, since each run
# makes new ids. The same in SQL of PostgreSQL and of Spark; no text holds a NUL.
SEPARATOR = b"\0"
HASH = (
    "pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(topic, 'UTF8') || '\\x00'::bytea"
    " || CASE WHEN key = message_id::text THEN '\\x'::bytea ELSE pg_catalog.convert_to(key, 'UTF8') END"
    " || '\\x00'::bytea || coalesce(value, pg_catalog.convert_to(value_json::text, 'UTF8'))), 'hex'), 16)"
)
HASH_IN_SPARK = (
    "left(sha2(concat(encode(topic, 'UTF-8'), X'00', encode(if(key = message_id, '', key), 'UTF-8'), X'00', "
    "coalesce(value, encode(value_json, 'UTF-8'))), 256), 16)"
)


@dataclass(frozen=True, slots=True)
class BatchContent:
    """How many rows, and the sums of their hashes, which no order changes."""

    messages: int = 0
    digest: bytes = bytes(8 * SUMS)

    @classmethod
    def of(
        cls, topic: "pa.Array | str", key: "pa.Array | str", value: pa.Array, rest: "pa.Array | None"
    ) -> "BatchContent":
        """Return the content of rows, each with a topic, a key ("" for none), a value and the bytes of all else."""
        hashes = [sha256(row).digest()[: 8 * SUMS] for row in _hashed_bytes(topic, key, value).to_pylist()]
        if rest is not None:
            pairs = zip(hashes, rest.to_pylist(), strict=True)
            hashes = [hash[:SENT_BYTES] + blake2b(hash + row, digest_size=16).digest() for hash, row in pairs]
        return cls(len(value), _sum(b"".join(hashes)))

    def __add__(self, other: "BatchContent") -> "BatchContent":
        return BatchContent(self.messages + other.messages, _sum(self.digest + other.digest))

    def under(self, heading: str) -> "BatchContent":
        """Return the content, in 16 bytes, of these rows under a heading: what they are called, and what is for all."""
        rest = blake2b(heading.encode() + self.digest, digest_size=8).digest()
        return BatchContent(self.messages, self.digest[:SENT_BYTES] + rest)


def _hashed_bytes(topic: "pa.Array | str", key: "pa.Array | str", value: pa.Array) -> pa.Array:
    columns = [x.encode() if isinstance(x, str) else pc.cast(x, pa.large_binary()) for x in (topic, key, value)]
    return joined(columns[0], SEPARATOR, columns[1], SEPARATOR, columns[2])


def _sum(hashes: bytes) -> bytes:
    sums = np.frombuffer(hashes, ">u8").reshape(-1, SUMS)
    return bytes(sums.sum(axis=0, dtype="u8").astype(">u8").tobytes())
