"""Trim: what both ends of a link delete, and what they never delete."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from dispatcher.delivery.deliver import DELIVERY_SESSION
from dispatcher.housekeeping.janitor import SWEEP_INTERVAL_S, Janitor
from dispatcher.housekeeping.trim import Trim
from dispatcher.lanes.leading import KEEPER
from mailroom.session import settings
from mailroom.sql.operation import Execute, Step
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.explain import nodes
from tests.support.explain import pages as pages_of
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

OLD = "UPDATE mailroom.transit SET stamped_at = stamped_at - interval '3 days'"
OLD_RECEIPTS = "UPDATE mailroom.receipt SET received_at = received_at - interval '4 days' WHERE last <= %s"


@pytest.fixture
def link(source: Node, target: Node) -> Linked:
    return linked(source, target, ["order.paid"])


def put(link: Linked, rows: int, acked: int = 0) -> None:
    link.put(*[{}] * rows)
    link.source.connection.execute("UPDATE mailroom.link SET acked = %s", [acked])


def acknowledge(link: Linked, seq: int, days: float = 0) -> None:
    """Let the reader acknowledge that row, and the source note it; then let days go by."""
    link.source.connection.execute("UPDATE mailroom.link SET acked = %s", [seq])
    run(link.source.connection, Trim(SCHEMA).listing_links())
    age(link, days)


def age(link: Linked, days: float) -> None:
    """Let this many days go by, as the source's links see it."""
    link.source.connection.execute(
        "UPDATE mailroom.link SET acked_at = ARRAY("
        "SELECT at - %s * interval '1 day' FROM unnest(acked_at) WITH ORDINALITY AS a (at, nth) ORDER BY nth)",
        [days],
    )


def receive(link: Linked, *lasts: int) -> None:
    """Write receipts that end at these seqs."""
    first = 1
    for last in lasts:
        ids = link.source.rows("SELECT message_id FROM mailroom.transit WHERE seq BETWEEN %s AND %s ORDER BY seq",
                               first, last)  # fmt: skip
        link.target.connection.execute(
            "INSERT INTO mailroom.receipt (origin, last, first, last_id, stamped_at, sent_clock, ids) "
            "VALUES (%s, %s, %s, %s, now(), %s, %s)",
            [link.origin, last, first, ids[-1][0], last, [id for (id,) in ids]],
        )
        first = last + 1


def trim_rows(link: Linked, trim: Trim) -> bool:
    more = False
    with link.source.connection.transaction():
        for each in run(link.source.connection, trim.listing_links()):
            if each.is_full:
                run(link.source.connection, trim.cutting_full(each))
            more = run(link.source.connection, trim.trimming_rows(each)) or more
    return more


def trim_receipts(link: Linked, trim: Trim) -> bool:
    [origin] = run(link.target.connection, trim.listing_origins())
    return run(link.target.connection, trim.trimming_receipts(origin))


def seqs(link: Linked) -> list[int]:
    return [seq for (seq,) in link.source.rows("SELECT seq FROM mailroom.transit ORDER BY seq")]


def receipts(link: Linked) -> list[Any]:
    return list(link.receipts("last, pg_catalog.cardinality(ids)"))


# -- The source -------------------------------------------------------------------------------------------------------


def test_rows_below_the_acknowledged_one_go_when_it_was_acknowledged_long_ago(link: Linked) -> None:
    put(link, 6)
    acknowledge(link, 4, days=3)
    acknowledge(link, 5)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [4, 5, 6]


def test_what_a_reader_has_just_acknowledged_stays_however_old_it_is(link: Linked) -> None:
    """The reader was away for longer than that, and may be put back to before it came to these rows."""
    put(link, 6)
    link.source.connection.execute(OLD)
    acknowledge(link, 5)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [1, 2, 3, 4, 5, 6]
    age(link, 1.9)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [1, 2, 3, 4, 5, 6]
    age(link, 0.2)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [5, 6]


def test_what_is_not_acknowledged_stays_however_old_it_is(link: Linked) -> None:
    put(link, 6)
    link.source.connection.execute(OLD)
    acknowledge(link, 3, days=3)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [3, 4, 5, 6]


def test_reader_that_is_put_back_gets_the_whole_time_for_what_it_acknowledges_again(link: Linked) -> None:
    put(link, 6)
    acknowledge(link, 2, days=1)
    acknowledge(link, 6, days=1.5)
    link.source.connection.execute("UPDATE mailroom.link SET acked = 3")  # put back, and at once there again
    acknowledge(link, 6, days=1)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [2, 3, 4, 5, 6]
    age(link, 1)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [6]


def test_acknowledgements_are_noted_some_fifty_times_within_the_time_and_only_if_there_are_any(link: Linked) -> None:
    put(link, 210)
    for seq in range(1, 200):
        acknowledge(link, seq, days=0.02)
        trim_rows(link, Trim(SCHEMA))
        [(acks,)] = link.source.rows("SELECT acks FROM mailroom.link")
        assert len(acks) <= 50
        if seq > 150:  # two days are 100 steps, and a note is made at each third of them
            assert 95 <= seq - seqs(link)[0] <= 105
    age(link, 10)
    acknowledge(link, 200)
    with link.source.connection.transaction():
        trim_rows(link, Trim(SCHEMA))
        run(link.source.connection, Trim(SCHEMA).listing_links())
        [(acks,)] = link.source.rows("SELECT acks FROM mailroom.link")
        assert (len(acks), acks[-1]) == (2, 200)
        assert link.source.value("SELECT xmin = pg_current_xact_id()::xid FROM mailroom.link") is False


def test_clock_that_was_set_back_does_not_keep_rows_for_longer_than_from_then_on(link: Linked) -> None:
    put(link, 6)
    acknowledge(link, 2, days=-400)
    acknowledge(link, 4, days=-300)
    run(link.source.connection, Trim(SCHEMA).listing_links())
    age(link, 2.1)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [4, 5, 6]


def test_newest_row_of_a_link_stays(link: Linked) -> None:
    """It is the number from which the next stamp goes on."""
    put(link, 3)
    acknowledge(link, 3, days=3)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [3]
    # Whatever a reader has acknowledged.
    acknowledge(link, 10, days=3)
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [3]


def test_each_link_keeps_its_rows_as_long_as_it_says(link: Linked) -> None:
    put(link, 3, acked=3)
    link.source.connection.execute("UPDATE mailroom.link SET keep_s = 0")
    trim_rows(link, Trim(SCHEMA))
    assert seqs(link) == [3]


def test_full_portion_calls_for_coming_back_and_the_next_one_goes_on_there(link: Linked) -> None:
    put(link, 7)
    acknowledge(link, 7, days=3)
    trim = Trim(SCHEMA, rows=2)
    assert trim_rows(link, trim)
    assert seqs(link) == [3, 4, 5, 6, 7]
    while trim_rows(link, trim):
        pass
    assert seqs(link) == [7]


def test_trimmed_rows_are_not_scanned_again_under_a_held_snapshot(link: Linked, connect: Connect) -> None:
    put(link, 5_000)
    acknowledge(link, 4_999, days=3)
    trim = Trim(SCHEMA)
    trim.over("a session")
    holder = connect()
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    holder.execute("SELECT count(*) FROM mailroom.transit")
    for name, value in DELIVERY_SESSION.items():
        link.source.connection.execute("SELECT set_config(%s, %s, false)", [name, value])
    trim_rows(link, trim)
    assert seqs(link) == [4_999, 5_000]
    put(link, 3)
    acknowledge(link, 5_003, days=3)
    trim.over("a session")
    assert pages(link, trim) < 30
    trim.over("another session")  # which knows nothing of the first one, and reads them once
    assert pages(link, trim) > 100


def pages(link: Linked, trim: Trim) -> int:
    """Return how many pages the next trim of the source would read."""
    [kept] = run(link.source.connection, trim.listing_links())
    return pages_read(link.source, next(trim.trimming_rows(kept)))


def pages_read(node: Node, step: Step) -> int:
    assert isinstance(step, Execute)
    with node.connection.transaction(force_rollback=True):
        [(plan,)] = node.connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {step.statement.sql}".encode(), step.values
        ).fetchall()
    return pages_of(list(nodes(plan[0]["Plan"])), "transit", "receipt")


def test_link_with_more_rows_waiting_than_it_may_have_is_cut_and_says_so_once(
    link: Linked, caplog: pytest.LogCaptureFixture
) -> None:
    put(link, 6, acked=2)
    link.source.connection.execute("UPDATE mailroom.link SET max_rows = 4")
    trim = Trim(SCHEMA)
    trim_rows(link, trim)
    assert link.source.value("SELECT state FROM mailroom.link") == "open"
    link.put({})
    for _ in range(3):
        trim_rows(link, trim)
    assert link.source.value("SELECT state FROM mailroom.link") == "cut"
    assert link.source.rows("SELECT actor, action, key, messages FROM mailroom.audit") == [
        ("dispatcher", "link cut", "south", 5)
    ]
    [told] = [record.getMessage() for record in caplog.records]
    assert "mailroom link allow south" in told
    assert seqs(link) == [7]  # nobody will read the others


def test_what_is_acknowledged_meanwhile_keeps_a_link_from_being_cut(link: Linked) -> None:
    put(link, 6, acked=0)
    link.source.connection.execute("UPDATE mailroom.link SET max_rows = 4")
    [kept] = run(link.source.connection, Trim(SCHEMA).listing_links())
    link.source.connection.execute("UPDATE mailroom.link SET acked = 6")
    assert not run(link.source.connection, Trim(SCHEMA).cutting_full(kept))
    assert link.source.value("SELECT state FROM mailroom.link") == "open"


# -- The target -------------------------------------------------------------------------------------------------------


def test_of_the_receipts_that_are_too_old_the_newest_stays_without_its_ids(link: Linked) -> None:
    """It is the row to go back to, if the source is put back to before all that was received since."""
    put(link, 9)
    receive(link, 2, 4, 6, 9)
    link.target.connection.execute(OLD_RECEIPTS, [6])
    trim_receipts(link, Trim(SCHEMA))
    assert receipts(link) == [(6, 0), (9, 3)]


def test_receipts_stay_a_day_longer_than_the_source_keeps_its_rows(link: Linked) -> None:
    """If the source is put back as far as it keeps rows, they tell what only the target has."""
    put(link, 6)
    receive(link, 2, 4, 6)
    link.target.connection.execute(OLD_RECEIPTS, [4])
    link.target.connection.execute("UPDATE mailroom.origin SET keep_s = 3.1 * 86400")
    trim_receipts(link, Trim(SCHEMA))
    assert receipts(link) == [(2, 2), (4, 2), (6, 2)]
    link.target.connection.execute("UPDATE mailroom.origin SET keep_s = 2.9 * 86400")
    trim_receipts(link, Trim(SCHEMA))
    assert receipts(link) == [(4, 0), (6, 2)]


def test_newest_receipt_of_an_origin_stays_however_old_it_is(link: Linked) -> None:
    """It is the position."""
    put(link, 6)
    receive(link, 2, 4, 6)
    link.target.connection.execute(OLD_RECEIPTS, [6])
    trim = Trim(SCHEMA)
    for _ in range(3):
        trim_receipts(link, trim)
    assert receipts(link) == [(6, 0)]
    # And there is nothing left to write.
    with link.target.connection.transaction():
        trim_receipts(link, trim)
        assert link.target.value("SELECT pg_current_xact_id_if_assigned()") is None


def test_receipts_that_went_are_not_scanned_again_under_a_held_snapshot(link: Linked, target_dsn: str) -> None:
    link.target.connection.execute(
        "INSERT INTO mailroom.receipt (origin, last, first, last_id, stamped_at, sent_clock, received_at, ids) "
        "SELECT %s, n, n, gen_random_uuid(), now(), n, now() - interval '4 days', ARRAY[gen_random_uuid()] "
        "FROM generate_series(1, 2000) AS n",
        [link.origin],
    )
    trim = Trim(SCHEMA, receipts=3_000)
    trim.over("a session")
    with psycopg.connect(target_dsn) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM mailroom.receipt")
        for name, value in DELIVERY_SESSION.items():
            link.target.connection.execute("SELECT set_config(%s, %s, false)", [name, value])
        trim_receipts(link, trim)
        assert receipts(link) == [(2_000, 0)]
        trim.over("a session")
        assert pages_of_receipts(link, trim) < 40
        trim.over("another session")  # which knows nothing of the first one, and reads them once
        assert pages_of_receipts(link, trim) > 50


def pages_of_receipts(link: Linked, trim: Trim) -> int:
    [held] = run(link.target.connection, trim.listing_origins())
    return pages_read(link.target, next(trim.trimming_receipts(held)))


def test_receipts_go_in_portions_and_the_next_one_goes_on_there(link: Linked) -> None:
    put(link, 8)
    receive(link, *range(1, 9))
    link.target.connection.execute(OLD_RECEIPTS, [7])
    trim = Trim(SCHEMA, receipts=3)
    assert trim_receipts(link, trim)
    assert receipts(link)[0] == (3, 0)
    while trim_receipts(link, trim):
        pass
    assert receipts(link) == [(7, 0), (8, 1)]
    # Receipts were cut below where it stood, and others came.
    link.target.connection.execute("DELETE FROM mailroom.receipt")
    receive(link, 2, 4, 6)
    link.target.connection.execute(OLD_RECEIPTS, [4])
    while trim_receipts(link, trim):
        pass
    assert receipts(link) == [(4, 0), (6, 2)]


def test_known_messages_stay_until_the_receipt_with_which_they_came_again_goes(link: Linked) -> None:
    put(link, 4)
    receive(link, 2, 4)
    twin, other = (id for (id,) in link.source.rows("SELECT message_id FROM mailroom.transit WHERE seq IN (1, 4)"))
    for id in (twin, other, uuid4()):
        link.target.connection.execute("INSERT INTO mailroom.known VALUES (%s, %s)", [link.origin, id])
    trim_receipts(link, Trim(SCHEMA))
    assert link.target.value("SELECT count(*) FROM mailroom.known") == 3
    link.target.connection.execute(OLD_RECEIPTS, [2])
    trim_receipts(link, Trim(SCHEMA))
    known = {id for (id,) in link.target.rows("SELECT message_id FROM mailroom.known")}
    assert (len(known), twin in known, other in known) == (2, False, True)


# -- The janitor ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def keeper(link: Linked) -> AsyncIterator[psycopg.AsyncConnection]:
    connection = await settings.connect_async(link.source.dsn, "keeper", KEEPER)
    async with connection:
        yield connection


async def test_janitor_trims_once_a_minute_and_writes_nothing_when_there_is_nothing(
    link: Linked, keeper: psycopg.AsyncConnection
) -> None:
    now_s = 1_000.0
    janitor = Janitor(SCHEMA, lambda: now_s)
    put(link, 3, acked=3)
    await janitor.run_once(keeper)  # notes it
    age(link, 3)
    await janitor.run_once(keeper)
    assert seqs(link) == [1, 2, 3]
    now_s += SWEEP_INTERVAL_S
    await janitor.run_once(keeper)
    assert seqs(link) == [3]
    now_s += SWEEP_INTERVAL_S
    async with keeper.transaction():
        await janitor.run_once(keeper)
        written = await keeper.execute("SELECT pg_current_xact_id_if_assigned()")
        assert await written.fetchone() == (None,)


async def test_link_whose_row_is_locked_stops_no_other(
    link: Linked, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    put(link, 3, acked=0)
    link.source.connection.execute("UPDATE mailroom.link SET max_rows = 1")
    link.source.connection.execute("INSERT INTO mailroom.link (name, acked, keep_s) VALUES ('west', 2, 0)")
    link.source.connection.execute(
        "INSERT INTO mailroom.transit SELECT (t).* FROM (SELECT jsonb_populate_record(t, jsonb_build_object('link', "
        "(SELECT number FROM mailroom.link WHERE name = 'west'))) AS t FROM mailroom.transit AS t) AS t"
    )
    holder = connect()
    holder.execute("SELECT FROM mailroom.link WHERE name = 'south' FOR UPDATE")
    await Janitor(SCHEMA).run_once(keeper)
    assert link.source.rows(
        "SELECT name, count(*) FROM mailroom.transit JOIN mailroom.link ON number = link GROUP BY name ORDER BY name"
    ) == [("south", 3), ("west", 2)]
