"""The database to which a program's sessions have to lead, and how our own sessions get there.

A worker's batches run on connections of its source. The sessions beside them are our own. One that led to another
database would silently write there, and blame the wrong messages. So before each of them is used, it reads where it is,
and that is compared with the batches.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

import psycopg

from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.session import settings
from mailroom.session.parameters import parameters, unknown
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.pooler import lone_statement
from mailroom.sql.runner import run_async

# The start time distinguishes the server from a copy and from a standby, which agree in all the rest. It needs no
# right.
# D-statements-13: A program's own sessions follow connections that its source opened.
PLACE = Sql(
    """
SELECT oid::bigint, pg_catalog.pg_postmaster_start_time(), datname::text
FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()
""",
    columns=("bigint", "timestamptz", "text"),
)
RENEWED_AFTER_S = 60.0
MISSED_S = 5.0  # how long no batch gets a connection before the sessions beside them make room
ROOM_S = 30.0


class Elsewhere(ConfigurationError, ConnectionFailed):
    """One of our sessions leads to another database than the batches. Nothing was written there."""

    code = "MR-other-database"


@dataclass(frozen=True, slots=True)
class HomeDatabase:
    """A database of a running server. Its name is for people: two servers may have the same one."""

    oid: int
    server_started: datetime
    name: str = field(compare=False)


def reading_place() -> Operation[HomeDatabase]:
    """Return where this session is."""
    [row] = yield PLACE.at()()
    return HomeDatabase(*row)


class Home:
    """Where our own sessions have to lead: to `dsn`, or to where the `visited` connections are.

    `place` is that of the newest connection visited; None if there was none, and then any will do.
    """

    def __init__(
        self, dsn: str | None = None, *, apart: bool = False, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`apart`: the batches' connections are opened another way."""
        self._given = dsn
        self._is_apart = apart
        self._found: str | ConfigurationError = unknown("No connection of this source has been seen")
        self._monotonic = monotonic
        self._places: WeakKeyDictionary[Any, HomeDatabase] = WeakKeyDictionary()
        self._beside: list[psycopg.Connection | psycopg.AsyncConnection] = []  # never changed, but replaced
        self._lock = threading.Lock()
        self._refused: str | None = None
        self._renewed_at = -RENEWED_AFTER_S
        self._room_until = 0.0
        self._wanted_at: float | None = None
        self.place: HomeDatabase | None = None
        self.name = "" if dsn is None else settings.place(dsn)

    @classmethod
    def of(cls, dsn: "str | Home") -> "Home":
        """Return the home that a connection string names."""
        return dsn if isinstance(dsn, Home) else cls(dsn)

    @property
    def dsn(self) -> str:
        """The connection string of our own sessions. Raises `ConfigurationError` if it is unknown."""
        if self._given is not None:
            return self._given
        if isinstance(self._found, ConfigurationError):
            raise self._found
        return self._found

    @property
    def whereabouts(self) -> str:
        """Where the batches are, and how our own sessions get there if by another way; for display."""
        beside = settings.place(self._given) if self._is_apart and self._given is not None else self.name
        return self.name if beside == self.name else f"{self.name} (own sessions by way of {beside})"

    def visiting(self, driver: object) -> Operation[HomeDatabase]:
        """Return where a batch's connection is, and remember how its source opened it; `driver` is the driver's own.

        It asks once for each connection, in the batch's transaction.
        """
        try:
            found = self._places.get(driver)
        except TypeError:  # of a driver whose connections cannot be referred to weakly
            found = None
        if found is None:
            found = yield from reading_place()
            self._learn(driver, found)
        return found

    def _learn(self, driver: object, place: HomeDatabase) -> None:
        self.place = place
        with contextlib.suppress(TypeError):
            self._places[driver] = place
        try:
            self._found = parameters(driver, place.name)
        except ConfigurationError as error:
            self._found = error
        else:
            self.name = settings.place(self._found)
        if isinstance(self._found, ConfigurationError) or self._found != self._refused:
            self._refused = None

    def renews(self) -> bool:
        """Return whether the source should open a new connection, since ours are refused with the last one's login.

        A password may be a token that has expired since. It says so once a minute.
        """
        if self._given is not None or self._refused is None or self._refused != self._found:
            return False
        if self._monotonic() - self._renewed_at < RENEWED_AFTER_S:
            return False
        self._renewed_at = self._monotonic()
        return True

    def wanted(self) -> None:
        """Note that a batch wants a connection."""
        if self._wanted_at is None:
            self._wanted_at = self._monotonic()

    def given(self) -> None:
        """Note that a batch has got its connection."""
        self._wanted_at = None

    def missed(self) -> None:
        """Note that a batch got none. If no other one got one for some time either, give up the sessions beside them.

        That is for a while: perhaps the server gives too few. Where none is open there is nothing to give up: the
        server is away, and once it is back they are needed at once.
        """
        is_long = self._wanted_at is not None and self._monotonic() - self._wanted_at >= MISSED_S
        if is_long and not all(each.closed for each in self._beside):
            self._room_until = self._monotonic() + ROOM_S

    def check_room(self) -> None:
        """Raise `ConnectionFailed` if sessions beside the batches are given up."""
        if self._monotonic() < self._room_until:
            raise ConnectionFailed(
                f"The batches get no session of the server, so those beside them are given up for {ROOM_S:g} s. If the "
                "server is there, raise the CONNECTION LIMIT of the role or database, or max_connections.",
                code="MR-too-few-sessions",
            )

    def connect(self, role: str, session: Mapping[str, str]) -> psycopg.Connection:
        """Open one of our autocommit sessions, and compare nothing yet (`compare`). Raises `ConnectionFailed`."""
        self.check_room()
        dsn = self.dsn
        try:
            connection = settings.connect(dsn, role, session, autocommit=True)
        except ConnectionFailed:
            self._refused = dsn
            raise
        self._opened(connection)
        return connection

    async def connect_async(self, role: str, session: Mapping[str, str]) -> psycopg.AsyncConnection:
        """Open one of our autocommit sessions. Raises `ConnectionFailed`, and `Elsewhere` if it is not at home."""
        self.check_room()
        dsn = self.dsn
        try:
            connection = await settings.connect_async(dsn, role, session)
        except ConnectionFailed:
            self._refused = dsn
            raise
        self._opened(connection)
        if self.place is None:
            return connection
        try:
            async with lone_statement(connection):
                found = await run_async(connection, reading_place())
            self.compare(found)
        except BaseException:
            await connection.close()
            raise
        return connection

    def _opened(self, connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
        with self._lock:
            self._beside = [*(each for each in self._beside if not each.closed), connection]

    def compare(self, found: HomeDatabase, wanted: HomeDatabase | None = None) -> None:
        """Raise `Elsewhere` unless one of our sessions is where the batches are."""
        wanted = wanted or self.place
        if wanted is None or found == wanted:
            return
        for driver, place in list(self._places.items()):
            if place == wanted:  # asked again at their next batch: a pooler may since have led them to where ours are
                del self._places[driver]
        ours = settings.place(self.dsn)
        where = f"database {found.name}" if found.name != wanted.name else "a server of another start"
        raise Elsewhere(
            f"Mailroom's own sessions, to {ours}, reach {where}, and those of the source are in database "
            f"{wanted.name} by way of {self.name}. Nothing was written. Give listen_dsn, a connection string that "
            "leads to the same database, past any pooler."
        )
