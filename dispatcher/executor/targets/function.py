"""Functions that executables may call: a closed list that an administrator keeps. No message names what runs."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from dispatcher.executor.targets.target import quoted
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sqlstate import CANCELLED, sqlstate


@dataclass(frozen=True, slots=True)
class Function:
    """A function, by its quoted name, that takes one jsonb. A call may run for `timeout_s` seconds."""

    name: str
    is_void: bool
    timeout_s: float


Functions: TypeAlias = dict[str, Function]

# Not to_regprocedure: it fails without USAGE on the schema, and then only calls of that function may fail.
FUNCTIONS = Sql(
    """
SELECT f.name, f.function_schema, f.function_name, p.prorettype = 'void'::regtype, f.timeout_s
FROM {schema}.executable_function AS f
JOIN pg_catalog.pg_namespace AS s ON s.nspname = f.function_schema::name
JOIN pg_catalog.pg_proc AS p
  ON p.pronamespace = s.oid AND p.proname = f.function_name::name AND p.pronargs = 1
 AND p.proargtypes[0] = 'jsonb'::regtype AND p.prokind = 'f' AND NOT p.proretset
WHERE f.name = ANY(%(names)s::text[])
""",
    columns=("text", "text", "text", "boolean", "float8"),
)


def reading_functions(schema: str, names: Collection[str]) -> Operation[Functions]:
    """Return those of the named functions that are registered and exist."""
    if not names:
        return {}
    rows = yield FUNCTIONS.at(schema=schema)(names=sorted(names))
    return {
        name: Function(f"{quoted(schema)}.{quoted(function)}", is_void, timeout_s)
        for name, schema, function, is_void, timeout_s in rows
    }


LIMIT = Sql(
    "SELECT clock_timestamp(), current_setting('statement_timeout'), "
    "set_config('statement_timeout', %(timeout)s::text, true)",
    columns=("timestamptz", "text", "text"),
)
RESTORE = Sql("SELECT set_config('statement_timeout', %(timeout)s::text, true)", columns=("text",))
CALL = Sql("SELECT pg_catalog.to_jsonb({function}(%(arguments)s::text::jsonb))::text", columns=("text",))
CALL_VOID = Sql("SELECT {function}(%(arguments)s::text::jsonb)::text", columns=("text",))


class Cancelled(Exception):
    """The call was cancelled: by its timeout, or by pg_cancel_backend."""

    def __init__(self, function: Function, began: datetime, error: Exception) -> None:
        super().__init__(function, began, error)
        self.function = function
        self.began = began
        self.error = error


def calling(function: Function, arguments: str | None, *, at_most_s: float) -> Operation[str | None]:
    """Call a function, and return its result as JSON text. Errors pass through, except that 57014 becomes `Cancelled`.

    The call's timeout is the function's, at most `at_most_s`. Use within a savepoint: an error leaves the timeout set.
    """
    timeout_s = min(function.timeout_s, at_most_s)
    [(began, before, _)] = yield LIMIT.at()(timeout=f"{max(1, round(1000 * timeout_s))}ms")
    call = CALL_VOID if function.is_void else CALL
    try:
        [(result,)] = yield call.at(function=function.name)(arguments=arguments)
    except Exception as error:
        if sqlstate(error) == CANCELLED:
            raise Cancelled(function, began, error) from error
        raise
    yield RESTORE.at()(timeout=before)
    return None if function.is_void else result


OVERRUNS = Sql(
    "SELECT clock_timestamp() >= %(began)s::timestamptz + %(limit)s::float8 * interval '1 second'", columns=("boolean",)
)


def overrunning(cancelled: Cancelled) -> Operation[bool]:
    """Return whether a call that was just cancelled had reached its timeout, by the server's clock."""
    [(overran,)] = yield OVERRUNS.at()(began=cancelled.began, limit=cancelled.function.timeout_s)
    return bool(overran)
