"""Where a database runs, as the server says it."""

import psycopg

from mailroom.links.handshake.place import reading_place
from mailroom.sql.runner import run
from tests.support.databases import Connect, Databases


def test_place_is_that_of_this_database_on_this_server(connect: Connect) -> None:
    connection = connect(autocommit=True)
    place = run(connection, reading_place())
    [row] = connection.execute(
        "SELECT system_identifier, (SELECT oid::bigint FROM pg_database WHERE datname = current_database()), "
        "timeline_id::bigint, pg_postmaster_start_time() FROM pg_control_system(), pg_control_checkpoint()"
    ).fetchall()
    assert (place.system_id, place.database_oid, place.timeline, place.started_at) == row
    assert place.started_at.tzinfo is not None


def test_another_database_of_the_server_differs_in_its_oid_only(connect: Connect, databases: Databases) -> None:
    place = run(connect(autocommit=True), reading_place())
    url = databases.create(migrated=True)
    try:
        with psycopg.connect(url, autocommit=True) as other:
            there = run(other, reading_place())
    finally:
        databases.drop(url)
    assert there.database_oid != place.database_oid
    assert (there.system_id, there.timeline, there.started_at) == (place.system_id, place.timeline, place.started_at)
