"""How far one send, or one act of a reader, may raise a node's clock."""

from uuid import uuid4

import psycopg
import pytest
from psycopg import errors

from mailroom.errors import LinkRefused
from mailroom.links.handshake.diverged import checking_claim
from mailroom.links.handshake.identity import JUMP
from mailroom.links.marks import asking_mark, marking
from mailroom.message.outgoing import Outgoing
from mailroom.sql.runner import run
from outbox import Outbox
from tests.support.node import SCHEMA, Node
from tests.support.roles import named, rights

REACH = "SELECT mailroom.clock_reach()"
EXECUTABLE = (
    "INSERT INTO mailroom.outbox_executable (operation, key, value, after_clock) VALUES ('put', 'k', '\\x00', %s)"
)


def far(node: Node) -> int:
    """Let the node's clock be beyond where a start would take it, and return how far a send may go."""
    clock = int(node.value(REACH)) + 1_000
    node.connection.execute("SELECT setval('mailroom.clock', %s)", [clock])
    assert node.value(REACH) == clock + JUMP
    return clock + JUMP


def test_send_raises_the_clock_by_so_much_and_no_more(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    reach = far(node)
    node.send("order.paid", after_clock=reach)
    for beyond in (reach + 1, 2**62):
        with pytest.raises(errors.CheckViolation, match="more than 2\\^32 beyond the clock") as refused:
            node.send("order.paid", after_clock=beyond)
        assert refused.value.diag.constraint_name == "outbox_after_clock"
        assert "mailroom node advance" in str(refused.value.diag.message_hint)
    node.deliver_all()
    assert node.value("SELECT clock FROM mailroom.inbox_shipping") == reach + 1
    node.send("order.paid", after_clock=reach + 1 + JUMP)


def test_update_and_copy_are_bounded_alike(node: Node) -> None:
    reach = far(node)
    node.send("order.paid")
    with pytest.raises(errors.CheckViolation, match="beyond the clock"):
        node.connection.execute("UPDATE mailroom.outbox SET after_clock = %s", [reach + 1])
    with (
        pytest.raises(errors.CheckViolation, match="beyond the clock"),
        node.connection.cursor().copy("COPY mailroom.outbox (topic, value_json, after_clock) FROM STDIN") as copy,
    ):
        copy.write_row(["order.paid", "1", reach + 1])


def test_executable_is_bounded_alike(node: Node) -> None:
    reach = far(node)
    node.connection.execute(EXECUTABLE, [reach])
    with pytest.raises(errors.CheckViolation, match="beyond the clock") as refused:
        node.connection.execute(EXECUTABLE, [reach + 1])
    assert refused.value.diag.constraint_name == "outbox_executable_after_clock"


def test_clock_of_a_node_that_has_started_anew_is_taken_by_one_that_never_has(node: Node) -> None:
    """It jumped by the time, and what it sends may cause messages anywhere."""
    node.inbox("shipping", "order.paid")
    jumped = node.value("SELECT (extract(epoch FROM now() - '2026-01-01 00:00+00') * 2^24)::bigint")
    node.send("order.paid", after_clock=jumped)
    node.deliver_all()
    assert node.value("SELECT clock FROM mailroom.inbox_shipping") > jumped


def test_sends_end_far_below_what_is_received(node: Node) -> None:
    """However often somebody sends: there is room for what nodes count by themselves."""
    node.connection.execute("SELECT setval('mailroom.clock', %s)", [2**61 - 10])
    assert node.value(REACH) == 2**61
    node.connection.execute("SELECT setval('mailroom.clock', %s)", [2**61 + 10])
    assert node.value(REACH) == 2**61 + 10


def test_ceiling_counts_where_a_crash_has_set_the_clock_back(node: Node) -> None:
    node.allow_clocks(2**50)
    assert node.value(REACH) >= 2**50 + JUMP


def test_writer_needs_no_right_on_the_clock(node: Node) -> None:
    node.connection.execute("CREATE ROLE writing")
    try:
        node.connection.execute(named(rights("writer"), "writing").encode())
        reach = far(node)
        node.connection.execute("SET ROLE writing")
        insert = "INSERT INTO mailroom.outbox (topic, value_json, after_clock) VALUES ('t', '1', %s)"
        node.connection.execute(insert, [reach])
        with pytest.raises(errors.CheckViolation):
            node.connection.execute(insert, [2**62])
    finally:
        node.connection.execute("RESET ROLE")
        node.connection.execute("DROP OWNED BY writing")
        node.connection.execute("DROP ROLE writing")


def test_replicated_row_is_taken_as_it_was_sent(node: Node) -> None:
    node.connection.execute("SET session_replication_role = replica")
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json, after_clock) VALUES ('t', '1', %s)", [2**61]
    )
    with pytest.raises(errors.CheckViolation):
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, value_json, after_clock) VALUES ('t', '1', %s)", [2**62 + 1]
        )


def test_batch_is_refused_as_a_whole(node: Node) -> None:
    with psycopg.connect(node.dsn) as connection:
        with pytest.raises(errors.CheckViolation, match="beyond the clock"):
            Outbox().send_many(connection, [Outgoing("t", 1), Outgoing("t", 2, after_clock=2**61)])
        connection.rollback()
    assert node.value("SELECT count(*) FROM mailroom.outbox") == 0


# -- Readers of a link ------------------------------------------------------------------------------------------------


def test_reader_that_is_further_ahead_gets_there_in_steps(node: Node) -> None:
    reach, daemon = far(node), uuid4()
    number = node.value("INSERT INTO mailroom.link (name, run) VALUES ('south', %s) RETURNING number", daemon)
    goal = reach + JUMP // 2
    for step in (reach, goal):
        with node.connection.transaction():
            assert run(node.connection, asking_mark(SCHEMA, number, daemon, goal))
        with node.connection.transaction():
            assert run(node.connection, marking(SCHEMA)) == 1
        assert node.value("SELECT max(sent_clock) FROM mailroom.transit") == step
    assert not run(node.connection, asking_mark(SCHEMA, number, daemon, goal))


def test_what_a_reader_wants_is_bounded_whoever_writes_it(node: Node) -> None:
    reach = far(node)
    node.connection.execute("INSERT INTO mailroom.link (name, wanted_clock) VALUES ('south', %s)", [2**63 - 1])
    assert node.value("SELECT wanted_clock FROM mailroom.link") == reach


def test_claim_that_is_too_far_is_refused_and_says_what_to_do(node: Node) -> None:
    """A clock below what the reader has received would put what is sent next before it, in a total inbox."""
    reach = far(node)
    node.connection.execute("INSERT INTO mailroom.link (name, claim_seq, claim_clock) VALUES ('south', 1, %s)", [reach])
    with pytest.raises(errors.CheckViolation, match=r"claim_clock .* beyond the clock") as refused:
        node.connection.execute("UPDATE mailroom.link SET claim_clock = %s", [reach + 1])
    assert "mailroom node advance" in str(refused.value.diag.message_hint)
    run(node.connection, checking_claim(SCHEMA, "north", reach))
    with pytest.raises(LinkRefused) as told:
        run(node.connection, checking_claim(SCHEMA, "north", reach + 1))
    assert told.value.command == f"mailroom node advance {reach + 1}"
