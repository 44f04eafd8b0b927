"""Arrays of text as SQLAlchemy binds them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import ARRAY, Text, TypeDecorator

if TYPE_CHECKING:
    from sqlalchemy import Dialect
    from sqlalchemy.types import TypeEngine


class TextArray(TypeDecorator[Any]):
    """`text[]`. On pg8000 it is bound as the text of an array, which the server casts.

    pg8000 itself quotes the element NULL but not null or Null, which PostgreSQL then reads as NULLs.
    """

    impl = ARRAY(Text)
    cache_ok = True

    def load_dialect_impl(self, dialect: "Dialect") -> "TypeEngine[Any]":
        """Return the type to bind on this driver."""
        return dialect.type_descriptor(Text() if dialect.driver == "pg8000" else ARRAY(Text()))

    def process_bind_param(self, value: Sequence[str | None] | None, dialect: "Dialect") -> Any:
        """Return the value to bind."""
        return literal(value) if value is not None and dialect.driver == "pg8000" else value


def literal(elements: Sequence[str | None]) -> str:
    """Return the array as an array literal, each text quoted."""
    return "{" + ",".join("NULL" if each is None else _quoted(each) for each in elements) + "}"


def _quoted(text: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
