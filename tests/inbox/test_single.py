"""A claim of the only message: `REAP_ONE` takes it by a small plan, and leaves all else to what follows it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from inbox import Inbox, Retry
from inbox.by_key import claim
from inbox.by_key.claim import Course, Share, reaping_any
from inbox.by_key.failure import failed, recording
from mailroom import set_inbox
from mailroom.sql.operation import Sql, Statement
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node, failing
from tests.support.waiting import WITHIN_S, wait_until_blocked
from tests.support.working import deliver

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping")]

SHARE = Share(9, 9, 9, due_too=False, hold=True)
SINGLE = Course(is_single=True)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the statements of claims that were run so far."""
    ran: list[str] = []
    name_of = {id(getattr(claim, name)): name for name in ("REAP_ONE", "REAP_PLAIN", "REAP_ANY")}
    render = Sql.at

    def at(sql: Sql, **names: str) -> Statement:
        ran.extend([name_of[id(sql)]] if id(sql) in name_of else [])
        return render(sql, **names)

    monkeypatch.setattr(Sql, "at", at)
    return ran


def taken(node: Node, course: Course = SINGLE, share: Share = SHARE) -> tuple[list[str], Course]:
    """Claim as a worker does, and undo it; return the keys of what was taken, and the next course."""
    with node.connection.transaction(force_rollback=True):
        claimed, after = run(node.connection, reaping_any(SCHEMA, "shipping", share, course))
        node.connection.execute("CLOSE ALL")
    return [each.key for each in claimed.messages], after


def test_a_claim_after_one_message_or_none_tries_the_small_statement_first(node: Node, statements: list[str]) -> None:
    course = Course()
    for keys, ran in (
        ([], ["REAP_PLAIN"]),
        (["a"], ["REAP_ONE"]),
        ([], ["REAP_ONE"]),
        (["a", "b"], ["REAP_ONE", "REAP_PLAIN"]),
        (["a", "b"], ["REAP_PLAIN"]),
        (["c"], ["REAP_PLAIN"]),
        (["c"], ["REAP_ONE"]),
    ):
        node.connection.execute("DELETE FROM mailroom.inbox")
        deliver(node, *keys)
        del statements[:]
        found, course = taken(node, course)
        assert (found, statements) == (keys, ran)


def test_a_worker_whose_batches_are_of_one_message_does_not_try_it_while_more_wait(
    node: Node, statements: list[str]
) -> None:
    one = Share(1, 1, 1, due_too=False, hold=True)
    for keys in (["a", "b"], ["a", "a"]):
        node.connection.execute("DELETE FROM mailroom.inbox")
        deliver(node, *keys)
        _, course = taken(node, Course(), one)
        del statements[:]
        assert (taken(node, course, one)[0], statements) == (["a"], ["REAP_PLAIN"])


def waits_after_a_failure(node: Node) -> None:
    with node.connection.transaction():
        [message] = Inbox("shipping").peek(node.connection)
        run(node.connection, failing("shipping", message, Retry(after_s=3_600)))


def is_paused(node: Node) -> None:
    with node.connection.transaction():
        Inbox("shipping").pause(node.connection, actor="me")


def is_larger_than_a_claim(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.inbox SET value = convert_to(repeat('x', 40000000), 'UTF8')")


def keeps_what_is_reaped(node: Node) -> None:
    with node.connection.transaction():
        set_inbox(node.connection, "shipping", keep_reaped_days=3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(waits_after_a_failure, []), (is_paused, []), (is_larger_than_a_claim, ["a"]), (keeps_what_is_reaped, ["a"])],
)
def test_what_is_not_as_simple_is_claimed_as_ever(
    change: Callable[[Node], None], expected: list[str], node: Node
) -> None:
    deliver(node, "a")
    change(node)
    assert taken(node)[0] == taken(node, Course())[0] == expected


def test_a_message_that_another_has_locked_is_left_alone(node: Node, connect: Connect) -> None:
    deliver(node, "a")
    other = connect()
    assert len(Inbox("shipping").reap_any(other)) == 1
    assert taken(node)[0] == []
    other.rollback()
    assert taken(node)[0] == ["a"]


def test_a_claim_that_began_before_a_failure_was_recorded_leaves_the_message(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the message's lock after the rollback, and its own snapshot does not see the record."""
    deliver(node, "bad")
    failing_batch, late, observer = connect(), connect(), connect(autocommit=True)
    [message] = Inbox("shipping").reap_any(failing_batch)
    gate = "> (SELECT healthy FROM bound)"
    slow = claim.REAP_ONE.template.replace(gate, f"{gate} AND pg_advisory_xact_lock(7) IS NOT NULL")
    assert slow != claim.REAP_ONE.template
    monkeypatch.setattr(claim, "REAP_ONE", Sql(slow, claim.REAP_ONE.columns))
    observer.execute("SELECT pg_advisory_lock(7)")
    with ThreadPoolExecutor(1) as thread:
        claimed = thread.submit(run, late, reaping_any(SCHEMA, "shipping", SHARE, SINGLE))
        wait_until_blocked(observer, late.info.backend_pid)
        with node.connection.transaction():
            run(node.connection, recording(SCHEMA, "shipping", failed(message, Retry(after_s=3_600))))
        failing_batch.rollback()
        observer.execute("SELECT pg_advisory_unlock(7)")
        assert claimed.result(WITHIN_S)[0].messages == []
