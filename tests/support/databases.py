"""A database for each test: a clone of a template that was migrated once per server and run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import psycopg
import sqlalchemy
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from mailroom.links.restored import taking_new_id
from mailroom.schema import migrate
from mailroom.sql.runner import run
from tests.support.waiting import eventually

_TEMPLATE_LOCK = 1_146_310_228


class Connect(Protocol):
    """What the fixture `connect` is: psycopg.connect to the test's database, closed at the end of the test."""

    def __call__(self, **options: Any) -> psycopg.Connection[TupleRow]: ...


class Databases:
    """The databases a worker makes on one server. `run` is in all their names, so that runs may share a server."""

    def __init__(self, dsn: str, run: str) -> None:
        self.dsn = dsn
        self._prefix = f"mailroom_test_{run}_"
        self._template = f"{self._prefix}template"
        self._server = psycopg.connect(dsn, autocommit=True, application_name="mailroom tests")
        self._template_made = False
        self._made = 0

    def close(self) -> None:
        self._server.close()

    def create(self, *, migrated: bool, meets_others: bool = True) -> str:
        """Make a database, with the schema `mailroom` or with none, and return its URL.

        Nodes that meet need ids of their own. A clone has the template's, and renaming it takes a third of the time.
        """
        if migrated and not self._template_made:
            self._make_template()
            self._template_made = True
        self._made += 1
        name = f"{self._prefix}{self._server.info.backend_pid}_{self._made}"
        template = self._template if migrated else "template0"
        self._server.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        url = self._url(name)
        if migrated and meets_others:
            with psycopg.connect(url) as connection:
                run(connection, taking_new_id("mailroom"))
        return url

    def leaks(self, dsn: str) -> list[str]:
        """Describe the connections and prepared transactions that a test left open in its database."""
        name = str(conninfo_to_dict(dsn)["dbname"])
        found: list[str] = []

        def none_is_left() -> bool:
            found[:] = self._backends(name)
            return not found

        with suppress(AssertionError):
            # A backend ends a moment after its client has closed the connection.
            eventually(none_is_left)
        return found + [f"prepared transaction {gid}" for gid in self._prepared(name)]

    def drop(self, dsn: str) -> None:
        """Drop the database, even if sessions are connected to it."""
        name = str(conninfo_to_dict(dsn)["dbname"])
        prepared = self._prepared(name)
        if prepared:
            with psycopg.connect(dsn, autocommit=True) as connection:
                for gid in prepared:
                    connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
        self._server.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def drop_all(self) -> None:
        """Drop all databases of the run, the template too: needed on a server that outlives the run."""
        names = self._server.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", [self._prefix])
        for (name,) in names.fetchall():
            self._server.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _make_template(self) -> None:
        with self._locked():
            # It takes connections until it is complete; one that still does was left by a migration that failed.
            complete = "SELECT NOT datallowconn FROM pg_database WHERE datname = %s"
            found = self._server.execute(complete, [self._template]).fetchone()
            if found == (True,):
                return
            self._server.execute(f"DROP DATABASE IF EXISTS {self._template}")
            self._server.execute(f"CREATE DATABASE {self._template} TEMPLATE template0 ENCODING 'UTF8'")
            url = self._url(self._template).replace("postgresql:", "postgresql+psycopg:", 1)
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
            with engine.begin() as connection:
                migrate(connection)
                # Each clone is a node of its own that was just made, and no node that was moved.
                connection.exec_driver_sql("UPDATE mailroom.node SET system_id = NULL")
                # Tests look at what they have changed themselves.
                connection.exec_driver_sql("DELETE FROM mailroom.audit")
            self._pack()
            self._server.execute(f"ALTER DATABASE {self._template} ALLOW_CONNECTIONS false")

    def _pack(self) -> None:
        """Write the catalogs of the template anew, without what a clone does not need: an eighth of it.

        Their maps of free and of visible pages are 70 of its 500 files, and each test copies and removes them. Our
        tables stay as a migration leaves them: the planner takes one that was never vacuumed for larger than it is.
        """
        url = self._url(self._template)
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute(
                "SELECT oid::regclass::text FROM pg_class "
                "WHERE relkind = 'r' AND NOT relisshared AND relnamespace = 'pg_catalog'::regnamespace"
            )
            connection.execute(f"VACUUM FULL {', '.join(name for (name,) in found)}")
        # A first session writes the file that spares the sessions of clones much reading of the catalogs.
        psycopg.connect(url).close()
        eventually(lambda: not self._backends(self._template))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._server.execute("SELECT pg_advisory_lock(%s, hashtext(%s))", [_TEMPLATE_LOCK, self._template])
        try:
            yield
        finally:
            self._server.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", [_TEMPLATE_LOCK, self._template])

    def _backends(self, name: str) -> list[str]:
        rows = self._server.execute(
            "SELECT pid, application_name, state, query FROM pg_stat_activity "
            "WHERE datname = %s AND backend_type = 'client backend'",
            [name],
        ).fetchall()
        return [f"backend {pid} of {application!r}, {state}: {query}" for pid, application, state, query in rows]

    def _prepared(self, name: str) -> list[str]:
        rows = self._server.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name])
        return [gid for (gid,) in rows.fetchall()]

    def _url(self, database: str) -> str:
        """Return the server's DSN as the URL of a database, which SQLAlchemy and other drivers understand too."""
        parts = {name: str(value) for name, value in conninfo_to_dict(self.dsn).items() if value is not None}
        parts.pop("dbname", None)
        host = quote(parts.pop("host", ""), safe=":")
        port = f":{parts.pop('port')}" if "port" in parts else ""
        user = quote(parts.pop("user", ""), safe="")
        password = f":{quote(parts.pop('password'), safe='')}" if "password" in parts else ""
        login = f"{user}{password}@" if user else ""
        options = f"?{urlencode(parts)}" if parts else ""
        return f"postgresql://{login}{host}{port}/{database}{options}"
