"""The pytest plugin `pytest_mailroom`: the fixture `mail`, and the two that users may override.

It is loaded into every run of pytest where Mailroom is installed. So what it needs is imported when a test asks for it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mailroom.testing.mail import AsyncMail, Mail


@pytest.fixture(scope="session")
def _mail_connections() -> Iterator[list[Any]]:
    """The connection that tests share, once there is one: opening one takes as long as a test."""
    opened: list[Any] = []
    yield opened
    for connection in opened:
        connection.close()


@pytest.fixture
def mail_connection(_mail_connections: list[Any]) -> Iterator[Any]:
    """The connection of `mail`: psycopg's, to the database named by MAILROOM_DSN. Override it to give another one.

    It may be what `Outbox.send` or `AsyncOutbox.send` takes: of psycopg, SQLAlchemy or Django.
    """
    import psycopg

    from mailroom.errors import ConfigurationError
    from mailroom.session import settings

    if not _mail_connections or _mail_connections[-1].closed:
        try:
            dsn = settings.dsn()
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error} Or override the fixture mail_connection in conftest.py to give a connection of yours.",
                code=error.code,
            ) from None
        _mail_connections.append(psycopg.connect(dsn))
    connection = _mail_connections[-1]
    yield connection
    if not connection.closed:
        connection.rollback()  # what a test did that took this fixture without `mail`


@pytest.fixture
def mail_schema() -> str:
    """The schema of the node that `mail` is about. Override it for another one than `mailroom`."""
    from mailroom.values.names import DEFAULT_SCHEMA

    return DEFAULT_SCHEMA


@pytest.fixture
def mail(mail_connection: Any, mail_schema: str) -> "Iterator[Mail | AsyncMail]":
    """Mailroom in this test, on `mail_connection`, which is rolled back afterwards: see `mailroom.testing.Mail`."""
    from mailroom.testing.mail import mailing

    with mailing(mail_connection, mail_schema) as mail:
        yield mail
