"""Two nodes, each in a database of its own."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.support.node import Node


@pytest.fixture
def source(dsn: str) -> Iterator[Node]:
    """The node that others read."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Node(dsn, connection)


@pytest.fixture
def target(target_dsn: str) -> Iterator[Node]:
    """The node that reads."""
    with psycopg.connect(target_dsn, autocommit=True) as connection:
        yield Node(target_dsn, connection)
