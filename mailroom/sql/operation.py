"""Operations: what runs in the caller's transaction, as generators that yield steps and receive rows.

`mailroom.sql.runner` runs an operation on whatever connection the caller has, sync or async; nothing here touches one.
SQL stands in `Sql` constants right above the operation that runs them.
"""

import re
from collections import namedtuple
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import starmap
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    LiteralString,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

if TYPE_CHECKING:
    from sqlalchemy.sql.elements import TextClause
    from sqlalchemy.types import TypeEngine

Row: TypeAlias = tuple[Any, ...]
T = TypeVar("T")

PARAMETER = re.compile(r"%\((\w+)\)s(?:::(\w+(?:\[\])?))?")
# A parameter, or a percent sign: a column of the user's may be called %(k)s.
# D-statements-1: Operations are generators.
# D-statements-3: Our cursors take `$n`.
UNNUMBERED = re.compile(r"%%|%\((\w+)\)s")


def filled(template: str, **parts: str | int) -> str:
    """Return a piece of SQL with each `{name}` of `parts` replaced; other names stay for the caller's own pieces."""
    for name, part in parts.items():
        if f"{{{name}}}" not in template:
            raise AssertionError(f"a part without a place in the statement: {name}")
        template = template.replace(f"{{{name}}}", str(part))
    return template


# What a statement's column has for a field of this type.
COLUMN_TYPES = {
    bool: "boolean", bytes: "bytea", datetime: "timestamptz", float: "float8", int: "bigint", str: "text", UUID: "uuid",
}  # fmt: skip


def columns_of(into: type) -> tuple[str, ...]:
    """Return the types of columns whose values are the fields of the class `into`, in their order."""
    return tuple(_column_type(hint) for hint in get_type_hints(into).values())


def _column_type(hint: Any) -> str:
    kinds = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)]
    return COLUMN_TYPES.get(hint) or _column_type(*kinds) + ("[]" if get_origin(hint) is tuple else "")


# D-statements-6: Every value has a cast.
class Sql:
    """One statement with `{names}` for identifiers and `%(name)s::type` for values.

    Every value has a cast, so that the statement means the same to each driver. `columns` are the types of the result,
    by name where it has so many that nobody would count them: `named` then gives its rows by those names. `into` is a
    NamedTuple or dataclass whose fields are the columns: then `named` gives rows of that class, and arrays as tuples.
    `parts` are pieces of SQL that several statements share; each replaces its `{name}`, as `filled` does. Identifiers
    are checked names (`mailroom.values.names`), so rendering needs no quoting rules. psycopg gives what an `undecoded`
    statement returns as `Undecoded`, to be passed on as a value of another one; other drivers decode it all the same.

    Call operators and functions with the exact types of one in pg_catalog, or with the prefix `pg_catalog.`. Otherwise
    an overload that another role has put into the caller's search_path could match better, and would run with the
    caller's rights.
    """

    def __init__(
        self,
        template: str,
        columns: Sequence[str] | Mapping[str, str] = (),
        *,
        into: type | None = None,
        undecoded: bool = False,
        **parts: str | int,
    ) -> None:
        template = filled(template, **parts)
        untyped = [match[1] for match in PARAMETER.finditer(template) if match[2] is None]
        if untyped:
            raise AssertionError(f"parameters without a cast: {untyped}")
        self.template = template
        self.columns = columns if into is None else columns_of(into)
        self.into = into
        self._has_tuples = into is not None and any(each.endswith("[]") for each in self.columns)
        self.undecoded = undecoded

    def at(self, **names: str) -> "Statement":
        """Return the statement with its identifiers filled in; it is rendered once per set of names."""
        return _rendered(self, tuple(names.items()))

    def named(self, rows: Iterable[Row]) -> list[Any]:
        """Return rows of the result with its columns' names."""
        if self._has_tuples:
            rows = (tuple(tuple(each) if isinstance(each, list) else each for each in row) for row in rows)
        return list(starmap(self.into or self._row, rows))

    @cached_property
    def _row(self) -> Any:
        return namedtuple("Named", self.columns)


@lru_cache(maxsize=4096)
def _rendered(sql: Sql, names: tuple[tuple[str, str], ...]) -> "Statement":
    text = sql.template
    for name, value in names:
        # The schema is quoted, since its name may be a keyword. Other names are parts of longer ones.
        text = text.replace("{" + name + "}", f'"{value}"' if name == "schema" else value)
    types = sql.columns.values() if isinstance(sql.columns, Mapping) else sql.columns
    return Statement(text.strip(), tuple(types), sql.undecoded)


@dataclass(frozen=True)
class Statement:
    """A rendered statement; call it with its values to get the step that runs it."""

    sql: LiteralString
    columns: tuple[str, ...]
    undecoded: bool = False

    def __call__(self, **values: object) -> "Execute":
        """Return the step that runs the statement with these values."""
        return Execute(self, values)

    @cached_property
    def numbered(self) -> tuple[bytes, tuple[str, ...]]:
        """The same statement with numbered parameters, as the server takes them, and their names in that order."""
        names = tuple(dict.fromkeys(match[1] for match in UNNUMBERED.finditer(self.sql) if match[1]))
        numbered = UNNUMBERED.sub(lambda match: f"${names.index(match[1]) + 1}" if match[1] else "%", self.sql)
        return numbered.encode(), names

    @cached_property
    def text(self) -> "TextClause":
        """The same statement for SQLAlchemy, with bound and result types."""
        from sqlalchemy import bindparam, column, text

        types = _sqlalchemy_types()
        bound = {match[1]: types[match[2]] for match in PARAMETER.finditer(self.sql)}
        # text() would read a single colon as a parameter.
        plain = re.sub(r"(?<!:):(?=\w)", r"\\:", self.sql)
        clause = text(PARAMETER.sub(r"CAST(:\1 AS \2)", plain).replace("%%", "%"))
        clause = clause.bindparams(*(bindparam(name, type_=kind) for name, kind in bound.items()))
        if not self.columns:
            return clause
        return clause.columns(*(column(f"c{i}", types[kind]) for i, kind in enumerate(self.columns)))  # type: ignore[return-value]  # TextualSelect runs like a TextClause


@lru_cache(maxsize=1)
def _sqlalchemy_types() -> dict[str, "TypeEngine[Any]"]:
    from sqlalchemy import ARRAY, BigInteger, Boolean, DateTime, Float, Integer, LargeBinary, Text, Uuid

    from mailroom.sql.text_array import TextArray

    scalars: dict[str, TypeEngine[Any]] = {
        "bigint": BigInteger(),
        "boolean": Boolean(),
        "bytea": LargeBinary(),
        "float8": Float(53),
        "integer": Integer(),
        "text": Text(),
        "timestamp": DateTime(),
        "timestamptz": DateTime(timezone=True),
        "uuid": Uuid(),
    }
    return scalars | {f"{name}[]": ARRAY(kind) for name, kind in scalars.items()} | {"text[]": TextArray()}


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A value of a result as the server sent it, in the binary form of its type; a value for the next statement."""

    oid: int
    data: bytes

    def __repr__(self) -> str:
        # Without the bytes, since a repr ends up in logs.
        return f"Undecoded(oid={self.oid}, {len(self.data)} bytes)"


class Execute(NamedTuple):
    """Run a statement; the operation receives all its rows."""

    statement: Statement
    values: dict[str, object]


class Together(NamedTuple):
    """Run statements one after the other; the operation receives the rows of the last.

    In a transaction of our own that has not begun, they are all of it: it takes one round trip, and is committed by
    the time the operation goes on.
    """

    steps: tuple[Execute, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Insert many rows: by COPY if driver and table allow it, not in a pipeline; else by a statement of arrays.

    `bound` asks whether the table has row security, and whether that binds this role: then the server refuses COPY,
    even of rows that the policies let in. An id in a row is a UUID or the bytes of one.
    """

    bound: Statement
    copy: Statement
    unnest: Statement
    columns: tuple[tuple[str, str], ...]
    rows: Sequence[Row]


BOUND = Sql(
    "SELECT relrowsecurity, pg_catalog.row_security_active(oid) FROM pg_catalog.pg_class "
    "WHERE oid OPERATOR(pg_catalog.=) '{schema}.{table}'::regclass",
    columns=("boolean", "boolean"),
)


class InTransaction:
    """Require that the connection is inside a transaction or begins one by itself."""


IN_TRANSACTION = InTransaction()

Step: TypeAlias = Execute | Together | Fill | InTransaction
Operation: TypeAlias = Generator[Step, Any, T]
