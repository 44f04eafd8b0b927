"""Answers of status 500: a command that will not be done is answered once, by the transaction that ends it."""

import json
from collections.abc import Callable
from secrets import token_hex
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inbox import Inbox, Message, Park, Parked, Skip, Worker
from inbox.by_key.due import reaping_due
from inbox.by_key.failure import Failed, failed, recording
from mailroom.message.answer import ASKS, Undone, reply_topic
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import run
from mailroom.testing import handle_all, sent, work
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.drivers import SYNC, opened
from tests.support.node import SCHEMA, Node
from tests.support.roles import rights, role
from tests.support.waiting import eventually
from tests.support.working import working

pytestmark = [
    pytest.mark.inbox("shipping", backoff_s=0, max_attempts=1, on_failure="skip"),
    pytest.mark.inbox("stock", backoff_s=0, max_attempts=1),
    pytest.mark.inbox("answers", "answered"),
]

OUTBOX, LETTERS = Outbox(), DeadLetters()
SECRET = "kanarienvogel"

NO_TOPICS = ["", "no topic", "1st", ".a", "a\n", "\u00e9", "a" * 201, "#", "*", "a/b", "a'b", "{}", "%s", "\u212a"]


class OutOfStock(Exception):
    """A failure whose class may be told, and whose text may not."""


def command(node: Node, topic: str, reply_to: str | None = "answered", **fields: Any) -> UUID:
    """Send a command and deliver it."""
    headers = fields.pop("headers", {}) | ({} if reply_to is None else {"reply_to": reply_to})
    id = node.send(topic, SECRET, kind="C", headers=headers, **fields)
    node.deliver_all()
    return id


def failing(error: Exception) -> Callable[[Message, Any], None]:
    def fail(_message: Message, _connection: Any) -> None:
        raise error

    return fail


def handle(_message: Message, _connection: Any) -> None:
    """Do nothing, and so answer nothing."""


def worked(node: Node, inbox: str, handler: Callable[[Message, Any], None]) -> None:
    with psycopg.connect(node.dsn) as connection:
        work(connection, inbox, handler)


def answers(node: Node) -> list[tuple[str, int, object]]:
    """Return correlation, status and value of the answers, delivered or not, in order."""
    node.deliver_all()
    found = Inbox("answers").peek(node.connection, limit=1_000)
    assert all(message.kind == "R" for message in found)
    return [(message.headers["correlation"], message.status, message.value) for message in found]


# -- Skipped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "name"), [(OutOfStock(SECRET), "OutOfStock"), (Skip(SECRET), "Skip")])
def test_skipped_command_is_answered_with_the_class_of_its_failure(node: Node, error: Exception, name: str) -> None:
    asked = command(node, "shipping", key="order-42", headers={"saga": "s"})
    worked(node, "shipping", failing(error))
    node.deliver_all()
    [answer] = Inbox("answers").peek(node.connection)
    assert (answer.topic, answer.kind, answer.status, answer.key) == ("answered", "R", 500, "order-42")
    assert answer.value == {"error": name}
    assert (answer.headers["correlation"], answer.headers["saga"]) == (str(asked), "s")
    assert SECRET not in repr(answer.headers)
    assert answer.sent_clock > node.value("SELECT clock FROM mailroom.dead_letter")


def test_answer_of_a_skip_is_in_the_transaction_that_ends_the_command(node: Node, connect: Connect) -> None:
    command(node, "shipping", key="k")
    connection = connect()
    [message] = Inbox("shipping").peek(connection)
    run(connection, recording(SCHEMA, "shipping", failed(message, OutOfStock(SECRET))))
    connection.commit()
    assert answers(node) == []
    assert run(connection, reaping_due(SCHEMA, "shipping")).ended is not None
    connection.rollback()
    assert answers(node) == []
    assert run(connection, reaping_due(SCHEMA, "shipping")).ended is not None
    connection.commit()
    assert [status for _, status, _ in answers(node)] == [500]


def test_command_that_killed_its_workers_is_answered(node: Node) -> None:
    asked = command(node, "shipping", key="k")
    [message] = Inbox("shipping").peek(node.connection)
    died = Failed("k", message.clock, asked, "it died", "WorkerDied")
    assert run(node.connection, recording(SCHEMA, "shipping", died)).outcome == "skip"
    worked(node, "shipping", handle)
    assert answers(node) == [(str(asked), 500, {"error": "WorkerDied"})]


@pytest.mark.slow
def test_skipped_command_that_was_answered_is_not_answered_again(node: Node) -> None:
    asked = command(node, "shipping", key="k")
    worked(node, "shipping", failing(OutOfStock()))
    once = answers(node)
    assert once == [(str(asked), 500, {"error": "OutOfStock"})]
    for _ in range(2):
        with node.connection.transaction():
            assert LETTERS.requeue(node.connection, None, actor="ada") == 1
        worked(node, "shipping", failing(OutOfStock()))
    with node.connection.transaction():
        assert LETTERS.discard(node.connection, None, actor="ada") == 1
    assert answers(node) == once


def test_dead_letter_keeps_its_other_headers(node: Node) -> None:
    command(node, "shipping", headers={"saga": "s", "note": "n"})
    worked(node, "shipping", failing(OutOfStock()))
    [letter] = LETTERS.find(node.connection)
    _, content = LETTERS.get(node.connection, letter.id) or (None, None)
    assert content is not None
    assert (dict(content.headers), content.value) == ({"saga": "s", "note": "n"}, SECRET)


def test_command_is_answered_whatever_it_carries(node: Node) -> None:
    large = {"saga": "s" * 3_000, "baggage": "b" * 3_000, "note": "n" * 2_000}
    asked = command(node, "shipping", headers=large)
    worked(node, "shipping", failing(OutOfStock()))
    node.deliver_all()
    [answer] = Inbox("answers").peek(node.connection)
    assert dict(answer.headers) == {
        "correlation": str(asked), "causation": str(asked), "status": "500", "saga": large["saga"],
    }  # fmt: skip


@pytest.mark.slow
def test_what_is_no_topic_asks_for_no_answer_and_stops_nobody(node: Node) -> None:
    for reply_to in NO_TOPICS:
        node.send("shipping", kind="C", headers={"reply_to": reply_to})
    node.deliver_all()
    worked(node, "shipping", failing(OutOfStock()))
    kept = [headers["reply_to"] for (headers,) in node.rows("SELECT headers FROM mailroom.dead_letter")]
    assert sorted(kept) == sorted(NO_TOPICS)
    assert answers(node) == []


@pytest.mark.parametrize("kind", ["M", "R"])
def test_only_commands_are_answered(node: Node, kind: str) -> None:
    node.send("shipping", kind=kind, headers={"reply_to": "answered"})
    node.deliver_all()
    worked(node, "shipping", failing(OutOfStock()))
    assert len(node.dead()) == 1
    assert answers(node) == []


def test_command_that_asks_for_none_gets_none(node: Node) -> None:
    command(node, "shipping", None)
    worked(node, "shipping", failing(OutOfStock()))
    assert len(node.dead()) == 1
    assert answers(node) == []


def test_skip_without_an_answer_does_not_ring_the_doorbell(node: Node, connect: Connect) -> None:
    node.send("shipping", key="k")
    node.deliver_all()
    heard = connect(autocommit=True)
    oid = node.value("SELECT 'mailroom.outbox'::regclass::oid::bigint")
    heard.execute(f'LISTEN "mailroom:{oid}"')
    worked(node, "shipping", failing(OutOfStock()))
    assert len(node.dead()) == 1
    assert list(heard.notifies(timeout=0)) == []


@pytest.mark.slow
def test_answer_has_the_key_that_the_command_wishes(node: Node) -> None:
    keys = {"r": "r", "": "k1", "r" * 1_025: "k2", "\u00e9" * 512: "\u00e9" * 512}
    for nth, reply_key in enumerate(keys):
        headers = {"reply_to": "answered", "reply_key": reply_key}
        node.send("shipping", kind="C", key=f"k{nth}", headers=headers)
    node.deliver_all()
    worked(node, "shipping", failing(OutOfStock()))
    node.deliver_all()
    assert {answer.key for answer in Inbox("answers").peek(node.connection)} == set(keys.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_skip_is_answered_on_every_driver(node: Node, kind: str) -> None:
    asked = command(node, "shipping", key="k")
    with opened(node.dsn, kind) as connection:
        work(connection, "shipping", failing(OutOfStock()))
        connection.commit()
    assert answers(node) == [(str(asked), 500, {"error": "OutOfStock"})]


def consumer(connection: psycopg.Connection[Any], inbox: str) -> None:
    """Go on as a role with the grants of a consumer that sends nothing. It goes with the transaction."""
    name = f"mailroom_test_{token_hex(8)}"
    connection.execute(f"CREATE ROLE {name}")
    for grant in rights("reaper", inbox):
        connection.execute(grant.replace("{role}", name).encode())
    connection.execute(f"SET LOCAL ROLE {name}")


def skipped_as_consumer(connection: psycopg.Connection[Any], inbox: str) -> None:
    """Fail and skip the first message of the inbox, as a worker of such a role does."""
    consumer(connection, inbox)
    [message] = Inbox(inbox).peek(connection, limit=1)
    run(connection, recording(SCHEMA, inbox, failed(message, OutOfStock(SECRET))))
    assert run(connection, reaping_due(SCHEMA, inbox)).ended is not None
    connection.execute("RESET ROLE")


@pytest.mark.parametrize("reply_to", ["answered", None])
def test_command_cannot_stop_a_worker_whose_role_may_not_answer(
    node: Node, caplog: pytest.LogCaptureFixture, reply_to: str | None
) -> None:
    asked = command(node, "shipping", reply_to, key="k")
    asks = reply_to is not None
    with psycopg.connect(node.dsn) as connection:
        skipped_as_consumer(connection, "shipping")
        [letter] = LETTERS.find(connection)
        assert letter.message_id == asked
        assert sent(connection, "answered") == []
        LETTERS.discard(connection, None, actor="ada")
        assert [answer.headers["correlation"] for answer in sent(connection, "answered")] == [str(asked)] * asks
        connection.rollback()
    told = [record.getMessage() for record in caplog.records if "not answered" in record.getMessage()]
    assert len(told) == asks
    assert all(str(asked) in line and SECRET not in line for line in told)


@pytest.mark.slow
def test_worker_whose_role_may_not_answer_goes_on(node: Node) -> None:
    with (
        role(node.dsn, *rights("reaper", "shipping")) as (_, dsn),
        working(Worker(dsn, "shipping", failing(OutOfStock()))),
    ):
        command(node, "shipping")
        eventually(lambda: len(node.dead()) == 1)
        command(node, "shipping")
        eventually(lambda: len(node.dead()) == 2)
    assert answers(node) == []


def test_command_skipped_without_an_answer_has_it_when_it_is_requeued(node: Node) -> None:
    command(node, "shipping", key="k")
    with psycopg.connect(node.dsn) as connection:
        skipped_as_consumer(connection, "shipping")
        LETTERS.requeue(connection, None, actor="ada")
        work(connection, "shipping", failing(OutOfStock()))
        assert [answer.value for answer in Inbox("answers").peek(connection)] == [{"error": "OutOfStock"}]
        connection.rollback()


# -- Parked -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parked_command_has_no_answer_until_it_is_discarded(node: Node) -> None:
    first, second = command(node, "stock", key="k"), command(node, "stock", key="k")
    other = command(node, "stock", key="other")
    worked(node, "stock", failing(OutOfStock(SECRET)))
    assert answers(node) == []
    with node.connection.transaction():
        Parked("stock").discard(node.connection, "k", actor="ada", dry_run=True)
    assert answers(node) == []
    with node.connection.transaction():
        Parked("stock").discard(node.connection, "k", actor="ada")
    assert answers(node) == [
        (str(first), 500, {"error": "OutOfStock"}),
        (str(second), 500, {"error": "Discarded"}),  # it was never tried
    ]
    with node.connection.transaction():
        Parked("stock").replay(node.connection, None, actor="ada")
    assert str(other) not in {asked for asked, _, _ in answers(node)}


@pytest.mark.slow
def test_discarding_some_of_a_key_answers_those_alone(node: Node) -> None:
    first, second = command(node, "stock", key="k"), command(node, "stock", key="k")
    worked(node, "stock", failing(Park(SECRET)))
    for asked, error in ((first, "Park"), (second, "Discarded")):
        with node.connection.transaction():
            Parked("stock").discard(node.connection, "k", per_key=1, actor="ada")
        assert answers(node)[-1:] == [(str(asked), 500, {"error": error})]
    assert len(answers(node)) == 2


def test_discarded_commands_are_answered_where_they_are(node: Node) -> None:
    """Those after a parked one are still in the inbox until the dispatcher moves them."""
    asked = [command(node, "stock", key="k") for _ in range(2)]
    worked(node, "stock", failing(OutOfStock()))
    assert node.value("SELECT count(*) FROM mailroom.inbox_stock") == 1
    with node.connection.transaction():
        Parked("stock").discard(node.connection, "k", actor="ada")
    assert [id for id, *_ in answers(node)] == list(map(str, asked))


def test_answers_of_a_discard_are_in_its_transaction(node: Node) -> None:
    command(node, "stock", key="k")
    worked(node, "stock", failing(OutOfStock()))
    with node.connection.transaction(force_rollback=True):
        Parked("stock").discard(node.connection, "k", actor="ada")
        assert node.value("SELECT count(*) FROM mailroom.outbox") == 1
    assert answers(node) == []
    assert len(Parked("stock").keys(node.connection)) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_discard_is_answered_on_every_driver(node: Node, kind: str) -> None:
    asked = command(node, "stock", key="k")
    plain = node.send("stock", key="k")
    lost = command(node, "nowhere")
    node.deliver_all()
    worked(node, "stock", failing(OutOfStock()))
    with opened(node.dsn, kind) as connection:
        changed = Parked("stock").discard(connection, "k", actor="ada")
        assert (changed.keys, changed.messages, changed.freed) == (1, 2, 1)
        assert LETTERS.discard(connection, None, actor="ada") == 1
        connection.commit()
    assert answers(node) == [(str(asked), 500, {"error": "OutOfStock"}), (str(lost), 500, {"error": "Discarded"})]
    assert str(plain) not in repr(answers(node))


# -- Dead letters -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_that_reached_nobody_is_answered_when_it_is_discarded(node: Node) -> None:
    asked = command(node, "nowhere", key="k")
    node.send("nowhere", kind="M", headers={"reply_to": "answered"})
    node.deliver_all()
    assert answers(node) == []
    with node.connection.transaction(force_rollback=True):
        LETTERS.discard(node.connection, None, actor="ada")
    assert answers(node) == []
    with node.connection.transaction():
        assert LETTERS.discard(node.connection, None, actor="ada") == 2
    assert answers(node) == [(str(asked), 500, {"error": "Discarded"})]


def test_command_that_reached_nobody_may_still_be_answered_when_it_is_requeued(node: Node) -> None:
    asked = command(node, "later", key="k")
    node.inbox("later")
    with node.connection.transaction():
        LETTERS.requeue(node.connection, None, actor="ada")

    def done(message: Message, connection: Any) -> None:
        OUTBOX.reply(connection, message, "done")

    with psycopg.connect(node.dsn) as connection:
        assert handle_all(connection, "later", done) == 1
    assert answers(node) == [(str(asked), 200, "done")]


# -- The rule ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example("a" * 200)
@example("a" * 201)
@example("answered\n")
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | st.sampled_from(NO_TOPICS))
def test_python_and_sql_agree_on_what_asks_for_an_answer(shared: psycopg.Connection[Any], reply_to: str) -> None:
    request = Undone(uuid4(), "k", {"reply_to": reply_to})
    [(asks,)] = shared.execute(
        f"SELECT {ASKS} FROM (SELECT 'C'::\"char\" AS kind, %s::text::jsonb AS headers) AS m",
        [json.dumps(request.headers)],
    ).fetchall()
    assert asks is (reply_topic(request) is not None)


@pytest.fixture
def shared(connect: Connect) -> psycopg.Connection[Any]:
    return connect(autocommit=True)
