"""What the catalogs say of a node, and that what is large is estimated."""

from typing import get_args

import psycopg
import pytest

from inbox import Inbox
from mailroom.figures.statistics import EXACT
from mailroom.metrics import catalog
from mailroom.metrics.catalog import reading_catalog
from mailroom.metrics.family import Family, Samples
from mailroom.node.dead_letter import Stage
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.roles import role

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping"), pytest.mark.inbox("billing")]

DEAD_LETTERS = """
INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, value, sent_at)
SELECT CASE WHEN n %% 4 = 0 THEN 'reap' ELSE 'deliver' END, 'no', gen_random_uuid(), 't', 'k', 'M', 'U', '\\x00', now()
FROM generate_series(1, %s) AS n"""
NONE = dict.fromkeys(get_args(Stage), 0)


def read(node: Node) -> dict[Family, Samples]:
    """Read them once all that this session has committed is in the statistics."""
    node.connection.execute("SELECT pg_stat_force_next_flush()")
    return run(node.connection, reading_catalog(SCHEMA))


def by_label(samples: Samples) -> dict[str, object]:
    return {label: value for (label,), value in samples}


def only(samples: Samples) -> float:
    [(labels, value)] = samples
    assert labels == ()
    assert isinstance(value, int | float)
    return value


def test_messages_of_inboxes_and_dead_rows_are_told_by_the_statistics(node: Node) -> None:
    node.allow_clocks()
    for _ in range(3):
        node.send("shipping")
    node.deliver()
    with node.connection.transaction():
        assert len(Inbox("shipping").reap_any(node.connection, max_keys=1)) == 1
    found = read(node)
    assert by_label(found[catalog.INBOX_MESSAGES]) == {"shipping": 2, "billing": 0}
    assert by_label(found[catalog.INBOX_DEAD_ROWS]) == {"shipping": 1, "billing": 0}
    tables = by_label(found[catalog.TABLE_DEAD_ROWS])
    assert tables["outbox"] == 3
    assert tables["transit"] == 0


def test_paused_inbox_is_told(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = now() WHERE name = 'billing'")
    assert by_label(read(node)[catalog.INBOX_PAUSED]) == {"shipping": 0, "billing": 1}


def test_labels_are_bounded_by_the_registry_and_the_schema(node: Node) -> None:
    node.connection.execute("CREATE TABLE mailroom.staging_0198 ()")
    node.connection.execute("DELETE FROM mailroom.inbox_registry WHERE name = 'billing'")
    found = read(node)
    assert list(by_label(found[catalog.INBOX_MESSAGES])) == ["shipping"]
    assert not [table for table in by_label(found[catalog.TABLE_DEAD_ROWS]) if table.startswith(("staging", "inbox_b"))]


def test_lease_of_a_dispatcher_that_never_led_is_not_held(node: Node) -> None:
    found = read(node)
    assert (by_label(found[catalog.LEASE_HELD]), by_label(found[catalog.LEASE_REMAINING])) == ({"dispatcher": 0}, {})


def test_lease_is_held_until_it_expires(node: Node) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.lease SELECT role, gen_random_uuid(), 1, now() + left_s * interval '1 s', 'h', 1, 1, "
        "now(), 'awake', '{}' FROM (VALUES ('dispatcher', 100), ('executor', -100)) AS l (role, left_s)"
    )
    found = read(node)
    left = by_label(found[catalog.LEASE_REMAINING])
    assert by_label(found[catalog.LEASE_HELD]) == {"dispatcher": 1, "executor": 0}
    assert 0 < left["dispatcher"] <= 100  # type: ignore[operator]
    assert left["executor"] <= -100  # type: ignore[operator]


def test_oldest_snapshot_is_that_of_a_transaction_which_keeps_dead_rows(node: Node, connect: Connect) -> None:
    idle = connect()
    idle.execute("SELECT 1")  # in a transaction, but without a snapshot or an id
    assert only(read(node)[catalog.OLDEST_SNAPSHOT]) == 0
    writing = connect()
    writing.execute("SELECT pg_current_xact_id()")
    [(since,)] = writing.execute("SELECT extract(epoch FROM clock_timestamp() - now())::float8").fetchall()
    assert only(read(node)[catalog.OLDEST_SNAPSHOT]) > since
    writing.rollback()
    assert only(read(node)[catalog.OLDEST_SNAPSHOT]) == 0


def test_clock_queue_and_numbers_that_are_left(node: Node) -> None:
    node.allow_clocks(500)
    node.connection.execute("SELECT setval('mailroom.clock', 7)")
    node.connection.execute(
        "SELECT setval('mailroom.outbox_position_seq', 9223372036854775807 / 4 * 3), "
        "setval('mailroom.attempt_id_seq', 9223372036854775807)"
    )
    found = read(node)
    margins = by_label(found[catalog.SEQUENCE_MARGIN])
    assert (only(found[catalog.CLOCK]), only(found[catalog.CLOCK_CEILING])) == (7, 500)
    assert only(found[catalog.NOTIFY_QUEUE]) < 0.1
    assert margins["outbox_position_seq"] == pytest.approx(0.25)
    assert (margins["attempt_id_seq"], margins["dead_letter_id_seq"]) == (0, 1)


def test_few_dead_letters_and_parked_messages_are_counted_without_statistics(node: Node) -> None:
    node.connection.execute(DEAD_LETTERS, [8])
    node.connection.execute(
        "INSERT INTO mailroom.parked (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, "
        "value, sent_at) SELECT 'shipping', 1, 1, message_id, message_id, topic, key, kind, message_type, value, "
        "sent_at FROM mailroom.dead_letter LIMIT 1"
    )
    read(node)
    node.connection.execute("SELECT pg_stat_reset()")
    found = read(node)
    assert by_label(found[catalog.DEAD_LETTERS]) == NONE | {"deliver": 6, "reap": 2}
    assert only(found[catalog.PARKED_MESSAGES]) == 1


def test_many_dead_letters_are_estimated_before_and_after_the_first_analyze(node: Node) -> None:
    node.connection.execute("ALTER TABLE mailroom.dead_letter SET (autovacuum_enabled = off)")
    node.connection.execute(DEAD_LETTERS, [4 * EXACT])
    expected = NONE | {"deliver": 3 * EXACT, "reap": EXACT}
    assert by_label(read(node)[catalog.DEAD_LETTERS]) == pytest.approx(expected, rel=0.01)
    node.connection.execute("ANALYZE mailroom.dead_letter")
    # All of one stage now stand after those that are looked at.
    node.connection.execute("UPDATE mailroom.dead_letter SET stage = 'order' WHERE stage = 'reap'")
    node.connection.execute("VACUUM ANALYZE mailroom.dead_letter")
    expected = NONE | {"deliver": 3 * EXACT, "order": EXACT}
    assert by_label(read(node)[catalog.DEAD_LETTERS]) == pytest.approx(expected, rel=0.01)


def test_role_without_rights_on_a_sequence_is_told_of_the_others(node: Node) -> None:
    granted = ("USAGE ON SCHEMA mailroom", "SELECT ON ALL TABLES IN SCHEMA mailroom", "SELECT ON mailroom.clock")
    with (
        role(node.dsn, *(f"GRANT {each} TO {{role}}" for each in granted)) as (_, dsn),
        psycopg.connect(dsn) as reader,
    ):
        assert list(by_label(run(reader, reading_catalog(SCHEMA))[catalog.SEQUENCE_MARGIN])) == ["clock"]
