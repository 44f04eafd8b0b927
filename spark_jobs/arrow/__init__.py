"""Columns of Arrow as bytes: CBOR, binary COPY, and the digest of what a batch holds."""
