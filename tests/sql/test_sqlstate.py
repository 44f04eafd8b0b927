"""What an error of the database means."""

import psycopg
import sqlalchemy
from psycopg import errors
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi

from mailroom.sql.sqlstate import (
    BLAMES,
    Meaning,
    is_held_up,
    meaning,
    meaning_of_code,
    sqlstate,
    was_invalidated,
)

MEANINGS = {
    "08006": Meaning.LOST,
    "57P01": Meaning.LOST,
    "25P03": Meaning.LOST,
    "40001": Meaning.AGAIN,
    "40P01": Meaning.AGAIN,
    "55P03": Meaning.AGAIN,
    "53100": Meaning.SERVER,
    "57014": Meaning.SERVER,
    "58030": Meaning.SERVER,
    "XX001": Meaning.SERVER,
    "25006": Meaning.READ_ONLY,
    "22P02": Meaning.DATA,
    "23505": Meaning.DATA,
    "54000": Meaning.DATA,
    "P0001": Meaning.DATA,
    "42703": Meaning.OTHER,
    "55000": Meaning.OTHER,
    "XX000": Meaning.OTHER,
    "25P02": Meaning.OTHER,
    "": Meaning.OTHER,
}


def test_each_code_means_one_thing() -> None:
    assert {code: meaning_of_code(code) for code in MEANINGS} == MEANINGS


def test_error_means_the_same_whichever_driver_raised_it() -> None:
    code = "58030"
    of_asyncpg = AsyncAdapt_asyncpg_dbapi.Error("no")  # type: ignore[no-untyped-call]
    of_asyncpg.pgcode = code
    of_pg8000 = Exception({"C": code, "M": "no"})
    for error in (errors.lookup(code)("no"), of_asyncpg, of_pg8000):
        assert meaning(error) is meaning(sqlalchemy.exc.DBAPIError("SELECT", {}, error)) is Meaning.SERVER


def test_what_a_driver_says_without_the_server_is_a_lost_session() -> None:
    for kind in (psycopg.OperationalError, psycopg.InterfaceError, ConnectionResetError):
        assert meaning(kind("no")) is Meaning.LOST


def test_what_is_no_error_of_a_database_may_be_to_blame() -> None:
    assert meaning(ValueError("no")) in BLAMES
    assert meaning(errors.UniqueViolation("no")) in BLAMES


def test_statement_that_waited_in_vain_leaves_its_session_as_good_as_it_was() -> None:
    held_up = [code for code in ("55P03", "57014", "57P01", "23505") if is_held_up(errors.lookup(code)("no"))]
    assert held_up == ["55P03", "57014"]


class Odd(Exception):
    """A user's error that has the drivers' names, for other things."""

    def __init__(self, *arguments: object, **attributes: object) -> None:
        super().__init__(*arguments)
        vars(self).update(attributes)


class Failing(Exception):
    """A user's error whose properties fail."""

    @property
    def sqlstate(self) -> str:
        raise ValueError("not yet")

    orig = connection_invalidated = sqlstate


ODD = [
    Odd(sqlstate=404),
    Odd(sqlstate=["40001"]),
    Odd(sqlstate="California"),
    Odd(pgcode=b"40001"),
    Odd(orig="shop.example"),
    Odd(orig={"sqlstate": "40001"}),
    Odd({"C": 404}),
    Odd({"C": "Celsius", "M": "warm"}),
    Odd({"id": 7}),
    Odd(args=None),
    Odd(connection_invalidated="no"),
    Odd(diag="healthy"),
    Failing(),
]


def test_error_that_has_the_drivers_names_for_other_things_is_no_error_of_a_database() -> None:
    assert [error for error in ODD if (sqlstate(error), meaning(error)) != ("", Meaning.OTHER)] == []
    assert [error for error in ODD if is_held_up(error) or was_invalidated(error)] == []
    assert [error for error in ODD if sqlstate(sqlalchemy.exc.DBAPIError("SELECT", {}, error))] == []
