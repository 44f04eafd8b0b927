"""The archive: what is reaped is there if and only if the reap commits; it is found, traced, replayed, and dropped."""

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.housekeeping.expiry import expiring
from dispatcher.housekeeping.janitor import Janitor
from inbox import (
    Archive,
    AsyncArchive,
    AsyncInbox,
    AsyncWorker,
    BatchHandler,
    Inbox,
    Message,
    Park,
    Parked,
    Reaped,
    Retry,
    Skip,
    Worker,
)
from inbox.asking.replies import taking
from inbox.by_key.claim import PIN, REAP_ANY, REAP_KEY, REAP_PLAIN, Share
from inbox.by_key.due import healing
from inbox.by_key.failure import failed
from inbox.by_key.parked_keys import moving_parked
from inbox.claims import Claims
from inbox.keeping import keeping
from inbox.order import reading_order
from mailroom import create_inbox, drop_inbox, rename_inbox, set_inbox
from mailroom.errors import ConfigurationError, InvalidMessage, NotInTransaction, UnknownInbox
from mailroom.node.trace import CAUSED, TRACE, causes, effects, trace
from mailroom.registry.archive_days import dropping_day, emptying, lacking, listing_over, making_ahead
from mailroom.sql.runner import run
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing
from tests.support.roles import rights, role
from tests.support.waiting import eventually, eventually_async
from tests.support.working import (
    LEDGER,
    NEVER_S,
    is_asleep,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

Session = psycopg.Connection[Any]
SHIPPING = Archive("shipping")
DAYS = 3
pytestmark = [pytest.mark.inbox("shipping", keep_reaped_days=DAYS), pytest.mark.node_sql(CLOCKS_ALLOWED)]


@pytest.fixture
def session(connect: Connect) -> Iterator[Session]:
    with connect() as connection:
        yield connection


def deliver(node: Node, *keys: str, topic: str = "shipping", **fields: Any) -> list[UUID]:
    """Send a message per key, and deliver them; their values are 0, 1 and so on."""
    ids = [node.send(topic, nth, key=key, **fields) for nth, key in enumerate(keys)]
    node.deliver_all()
    return ids


def kept(node: Node, inbox: str = "shipping") -> list[object]:
    """Return the values in an inbox's archive."""
    return [each.message.value for each in Archive(inbox).find(node.connection)]


def keep(node: Node, days: int, inbox: str = "shipping") -> None:
    with node.connection.transaction():
        set_inbox(node.connection, inbox, keep_reaped_days=days)


def fail(node: Node, key: str, error: Exception | None = None) -> None:
    [message] = Inbox("shipping").peek(node.connection, key, 1)
    with node.connection.transaction():
        run(node.connection, failing("shipping", message, error or Retry(0)))


def fields(message: Message) -> tuple[object, ...]:
    return tuple(getattr(message, name) for name in Message.__slots__ if name != "_value")


# -- What is kept -----------------------------------------------------------------------------------------------------


def due(connection: Session, inbox: str) -> list[Message]:
    """Make the first message fail, and take it as one that is due."""
    claims = Claims(SCHEMA, inbox)
    [first] = Inbox(inbox).peek(connection, limit=1)
    run(connection, failing(inbox, first, Retry(0)) if inbox == "shipping" else failing_total(connection, first))
    taken = run(connection, claims.claiming_due()).messages
    run(connection, run(connection, claims.looking_up()).healing(taken[-1]))
    return taken


def failing_total(connection: Session, first: Message) -> Any:
    return run(connection, reading_order(SCHEMA, "ledger")).recording(failed(first, Retry(0)))


WAYS: dict[str, tuple[str, Callable[[Session, str], list[Message]]]] = {
    "reap": ("shipping", lambda connection, inbox: Inbox(inbox).reap(connection, "a")),
    "reap_any": ("shipping", lambda connection, inbox: Inbox(inbox).reap_any(connection)),
    "reap_any of total order": ("ledger", lambda connection, inbox: Inbox(inbox).reap_any(connection)),
    "as a worker": (
        "shipping",
        lambda connection, inbox: (
            run(connection, Claims(SCHEMA, inbox).claiming(Share(1, 1, 1, due_too=False, hold=False))).messages
        ),
    ),
    "due": ("shipping", due),
    "due in total order": ("ledger", due),
    "replies": ("shipping", lambda connection, inbox: run(connection, taking(SCHEMA, inbox, ["r"]))),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_reaped_is_kept_if_the_transaction_commits(node: Node, session: Session, way: str) -> None:
    inbox, reap = WAYS[way]
    node.inbox("ledger", order="total", keep_reaped_days=1)
    deliver(node, "a", "b", "a", topic=inbox, headers={"saga": "s"})
    node.send(inbox, 3, kind="R", key="r")
    node.deliver_all()
    assert reap(session, inbox)
    session.rollback()
    assert kept(node, inbox) == []

    taken = reap(session, inbox)
    session.commit()
    found = Archive(inbox).find(node.connection)
    assert sorted(map(fields, (each.message for each in found))) == sorted(map(fields, taken))
    assert len(found) == len({each.message.clock for each in found}) == 4 - Inbox(inbox).backlog(node.connection)
    today = datetime.now(UTC).date()
    days = 1 if inbox == "ledger" else DAYS
    assert {day for (day,) in node.rows("SELECT drop_on FROM mailroom.reaped")} <= {
        today + timedelta(days + 1), today + timedelta(days),  # around midnight
    }  # fmt: skip
    assert all(abs(each.reaped_at - datetime.now(UTC)) < timedelta(minutes=1) for each in found)


@pytest.mark.slow
def test_walk_over_many_keys_is_kept_too(node: Node, session: Session) -> None:
    """The claim that goes beyond its window has another plan."""
    deliver(node, *(f"k{nth}" for nth in range(300)))
    claims = Claims(SCHEMA, "shipping")
    number = 0
    while taken := run(session, claims.claiming(Share(200, 1, 200))).messages:
        number += len(taken)
        session.commit()
    assert number == SHIPPING.count(node.connection) == 300


def test_what_is_not_handed_to_anybody_is_not_kept_unless_it_is_discarded(node: Node, session: Session) -> None:
    node.inbox("skipping", keep_reaped_days=1, max_attempts=1, on_failure="skip")
    with node.connection.transaction():
        set_inbox(node.connection, "shipping", max_attempts=1, expire_s=0.000001)
    deliver(node, "park", "old", "more", topic="shipping")
    deliver(node, "skip", topic="skipping")
    fail(node, "park")
    run(node.connection, moving_parked(SCHEMA, "shipping", ""))
    with node.connection.transaction():
        assert Parked("shipping").discard(node.connection, None, actor="ada").messages == 1
    assert run(node.connection, expiring(SCHEMA, "shipping", 10)) == 2
    with node.connection.transaction():
        [message] = Inbox("skipping").peek(node.connection)
        run(node.connection, failing("skipping", message, Skip("no")))
    assert node.dead()[0][:2] == ("skip", "reap")
    assert Inbox("skipping").backlog(node.connection) == Inbox("shipping").backlog(node.connection) == 0
    assert [(each.message.key, each.discarded) for each in SHIPPING.find(node.connection)] == [("park", True)]
    assert kept(node, "skipping") == []


def test_what_is_discarded_is_kept_if_the_transaction_commits_and_can_be_replayed(node: Node) -> None:
    node.inbox("plain", "shipping")
    node.inbox("ledger", "shipping", order="total", keep_reaped_days=1)
    ids = deliver(node, "k", "k", "k", "other", headers={"saga": "s"})
    of_ledger = run(node.connection, reading_order(SCHEMA, "ledger"))
    with node.connection.transaction():
        for inbox in ("shipping", "plain"):
            run(node.connection, failing(inbox, Inbox(inbox).peek(node.connection, "k", 1)[0], Park("no")))
        run(node.connection, of_ledger.recording(failed(Inbox("ledger").peek(node.connection)[0], Park("no"))))
        run(node.connection, of_ledger.claiming_due())
    held = Parked("shipping").messages(node.connection, "k")  # the first is in `parked`, and the others in the inbox
    with (
        role(node.dsn, *rights("operator", "shipping", "plain", "ledger")) as (_, dsn),
        psycopg.connect(dsn) as operator,
    ):
        Parked("shipping").discard(operator, "k", actor="ada")
        operator.rollback()
        assert kept(node) == []
        assert Parked("shipping").discard(operator, "k", actor="ada").messages == 3
        assert Parked("plain").discard(operator, "k", actor="ada").messages == 3
        assert Parked("ledger").discard(operator, None, actor="ada", per_key=1).messages == 1
        operator.commit()
        found = SHIPPING.find(operator)
        assert [fields(each.message) for each in found] == [fields(each) for each in held]
        assert all(each.discarded for each in found)
        assert [each.discarded for each in Archive("ledger").find(operator)] == [True]
        assert kept(node, "plain") == []
        assert SHIPPING.replay(operator, ids, actor="ada") == 3
        operator.commit()
    again = Inbox("shipping").peek(node.connection, "k")
    assert [(each.value, each.headers["causation"]) for each in again] == list(enumerate(map(str, ids[:3])))
    places = trace(node.connection, ids[1])
    assert [(each.where, each.inbox, each.reason) for each in places if each.where == "reaped"] == [
        ("reaped", "shipping", "discarded by hand")
    ]


def test_nothing_is_kept_by_default(node: Node, session: Session) -> None:
    node.inbox("plain")
    deliver(node, "a", "b", topic="plain")
    assert len(Inbox("plain").reap_any(session)) == 2
    session.commit()
    assert kept(node, "plain") == []
    assert node.value("SELECT count(*) FROM mailroom.reaped_day") == DAYS + 15  # of the other inbox


# -- The setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["key", "total"])
def test_a_claim_goes_by_the_setting_that_it_sees(node: Node, connect: Connect, order: Any) -> None:
    """Each claim sees the setting as it was committed; one consumer goes on through all changes."""
    node.inbox("news", order=order)
    deliver(node, *"abcdefgh", topic="news")
    consumer, operator, of = connect(), connect(), Inbox("news")

    def take(key: str) -> object:
        """Take one message: of a key, and of any in turn."""
        if order == "key" and key in "bdfh":
            [message] = of.reap(consumer, key)
        else:
            [message] = of.reap_any(consumer, 1, 1)
        consumer.commit()
        return message.key

    assert take("a") == "a"
    set_inbox(operator, "news", keep_reaped_days=2)
    assert take("b") == "b"  # not committed yet, and nobody waits
    operator.commit()
    assert (take("c"), take("d")) == ("c", "d")
    set_inbox(operator, "news", keep_reaped_days=0)
    assert take("e") == "e"
    operator.commit()
    assert (take("f"), take("g")) == ("f", "g")
    set_inbox(operator, "news", max_attempts=3)  # says nothing of it
    operator.commit()
    assert take("h") == "h"
    assert [each.message.key for each in Archive("news").find(node.connection)] == ["c", "d", "e"]


@pytest.mark.parametrize("keeps", [False, True])
def test_wrong_text_takes_nothing_and_says_so(node: Node, session: Session, keeps: bool) -> None:
    keep(node, 0 if keeps else DAYS)
    deliver(node, "a", "b")
    for statement in (REAP_PLAIN, REAP_ANY):
        names = Share(9, 9, 9).names(keeps=keeps)
        rows = run(session, _executing(statement.at(**names, schema=SCHEMA, inbox="shipping"),
                                       cursor="", depth=1.0, mine=[], but=[]))  # fmt: skip
        assert [each.fits for each in statement.named(rows)] == [False]
    rows = run(session, _executing(REAP_KEY.at(**keeping(keeps), schema=SCHEMA, inbox="shipping"), key="a", limit=9))
    assert [each.fits for each in REAP_KEY.named(rows)] == [False]
    session.commit()
    assert (Inbox("shipping").backlog(node.connection), kept(node)) == (2, [])


def _executing(statement: Any, **values: object) -> Any:
    yield PIN.at()()
    return (yield statement(**values))


def test_older_snapshot_goes_by_the_setting_that_it_sees(node: Node, connect: Connect) -> None:
    keep(node, 0)
    deliver(node, "a")
    old = connect()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert Inbox("shipping").backlog(old) == 1
    keep(node, DAYS)
    assert len(Inbox("shipping").reap_any(old)) == 1
    old.commit()
    assert kept(node) == []


def test_wrong_number_of_days(node: Node) -> None:
    for days in (-1, 367, True, 1.5):
        with pytest.raises(ConfigurationError, match="keep_reaped_days"), node.connection.transaction():
            set_inbox(node.connection, "shipping", keep_reaped_days=days)  # type: ignore[arg-type]


# -- Workers ----------------------------------------------------------------------------------------------------------


def test_worker_keeps_each_message_once_whatever_fails(node: Node) -> None:
    node.connection.execute(LEDGER)
    tries: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        tries.append(message.key)
        if tries.count(message.key) == 1 and message.key in ("b", "d"):
            raise Retry(0)

    keys = [*"abcdefg"]
    deliver(node, *keys)
    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: sorted(ledger_keys(node)) == keys)
    assert sorted(each.message.key for each in SHIPPING.find(node.connection)) == keys


def test_batch_handler_keeps_what_it_handles(node: Node) -> None:
    node.connection.execute(LEDGER)

    def handle(messages: list[Message], connection: Any) -> None:
        for message in messages:
            write_ledger(message, connection)

    deliver(node, *"abcabc")
    with working(Worker(node.dsn, "shipping", BatchHandler(handle), poll_interval_s=NEVER_S)):
        eventually(lambda: len(ledger_keys(node)) == 6)
    assert sorted(each.message.key for each in SHIPPING.find(node.connection)) == sorted("abcabc")


async def test_async_worker_keeps_what_it_handles(node: Node) -> None:
    node.connection.execute(LEDGER)
    deliver(node, *"abc")
    worker = AsyncWorker(node.dsn, "shipping", write_ledger_async, poll_interval_s=NEVER_S)
    async with working_async(worker):
        await eventually_async(lambda: len(ledger_keys(node)) == 3)
    assert sorted(each.message.key for each in SHIPPING.find(node.connection)) == [*"abc"]


def test_consumer_has_only_the_right_to_put_in_of_its_inbox(node: Node) -> None:
    node.inbox("other", keep_reaped_days=1)
    deliver(node, "a", topic="shipping")
    with role(node.dsn, *rights("reaper", "shipping")) as (_, dsn), psycopg.connect(dsn) as consumer:
        assert len(Inbox("shipping").reap_any(consumer)) == 1
        consumer.commit()
        columns = "message_id, topic, key, kind, message_type, sent_at, inbox, clock, sent_clock, origin, drop_on"
        row = "gen_random_uuid(), 't', 'k', 'M', 'U', now(), 'other', 1, 1, gen_random_uuid(), current_date + 2"
        for table in ("my_reaped", "reaped"):
            with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.WithCheckOptionViolation)):
                consumer.execute(f"INSERT INTO mailroom.{table} ({columns}) VALUES ({row})".encode())
            consumer.rollback()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            SHIPPING.find(consumer)
    assert kept(node) == [0]


# -- Days -------------------------------------------------------------------------------------------------------------


def noon(days: int = 0) -> datetime:
    """Return noon of a day, counted from today, in UTC."""
    return datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) + timedelta(days)


def partitions(node: Node) -> list[str]:
    return [name for (name,) in node.rows(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'mailroom.reaped'::regclass ORDER BY 1"
    )]  # fmt: skip


def turn(node: Node, now: datetime) -> list[date]:
    """Empty all days that are over, and drop those that were empty before; return those that are left over."""
    for day, is_empty in run(node.connection, listing_over(SCHEMA, now)):
        with node.connection.transaction():
            assert run(node.connection, (dropping_day if is_empty else emptying)(SCHEMA, day, now))
    return [day for day, _ in run(node.connection, listing_over(SCHEMA, now))]


def test_days_are_made_ahead_and_dropped_when_they_are_over(node: Node, session: Session) -> None:
    """What is reaped is kept for as many whole days as the inbox says, and then it is gone, all at once."""
    deliver(node, "a")
    assert len(Inbox("shipping").reap_any(session)) == 1
    session.commit()
    drop_on = node.value("SELECT drop_on FROM mailroom.reaped")
    [day] = node.rows("SELECT min(day), max(day), count(*) FROM mailroom.reaped_day")
    assert day[2] == DAYS + 15 == len(partitions(node)) == (day[1] - day[0]).days + 1
    assert not run(node.connection, lacking(SCHEMA))

    assert run(node.connection, lacking(SCHEMA, noon(3)))
    with node.connection.transaction():
        assert run(node.connection, making_ahead(SCHEMA, noon(3))) == 3
    assert not run(node.connection, lacking(SCHEMA, noon(3)))
    assert turn(node, noon(3)) == [day[0], day[0] + timedelta(1)]  # emptied, and dropped later
    assert kept(node) == [0]

    last = datetime(drop_on.year, drop_on.month, drop_on.day, 23, 59, tzinfo=UTC)
    turn(node, last)
    assert kept(node) == [0]
    over = last + timedelta(minutes=2)
    assert drop_on in turn(node, over)
    assert kept(node) == []
    assert turn(node, over + timedelta(minutes=2)) == []
    assert f"mailroom.reaped_{drop_on:%Y%m%d}" not in partitions(node)
    assert len(partitions(node)) == node.value("SELECT count(*) FROM mailroom.reaped_day") > 0


def test_day_whose_row_came_without_its_partition_is_made(node: Node) -> None:
    """Logical replication brings the rows of days, and not the tables that are made meanwhile."""
    missing = partitions(node)[-1]
    node.connection.execute(f"DROP TABLE {missing}".encode())
    assert run(node.connection, lacking(SCHEMA))
    with node.connection.transaction():
        assert run(node.connection, making_ahead(SCHEMA)) == 1
    assert missing in partitions(node)
    assert not run(node.connection, lacking(SCHEMA))


def test_emptied_day_is_dropped_a_minute_later(node: Node) -> None:
    [(day, _), *_] = run(node.connection, listing_over(SCHEMA, noon(5)))
    with node.connection.transaction():
        last = datetime(day.year, day.month, day.day, 23, 59, tzinfo=UTC)
        assert not run(node.connection, emptying(SCHEMA, day, last))  # it is not over
        assert not run(node.connection, dropping_day(SCHEMA, day, noon(5)))  # it is not empty
        assert run(node.connection, emptying(SCHEMA, day, noon(5)))
        assert not run(node.connection, emptying(SCHEMA, day, noon(5)))
        assert not run(node.connection, dropping_day(SCHEMA, day, noon(5) + timedelta(seconds=60)))
        assert run(node.connection, dropping_day(SCHEMA, day, noon(5) + timedelta(seconds=61)))


def test_reap_takes_the_last_day_there_is(node: Node, session: Session) -> None:
    """No daemon has made days for weeks."""
    left = node.value("SELECT min(day) + 2 FROM mailroom.reaped_day")
    for (day,) in node.rows("SELECT to_char(day, 'YYYYMMDD') FROM mailroom.reaped_day WHERE day > %s", left):
        node.connection.execute(f"DROP TABLE mailroom.reaped_{day}".encode())
    node.connection.execute("DELETE FROM mailroom.reaped_day WHERE day > %s", [left])
    deliver(node, "a")
    assert len(Inbox("shipping").reap_any(session)) == 1
    session.commit()
    assert node.value("SELECT drop_on FROM mailroom.reaped") == left
    with node.connection.transaction():
        assert run(node.connection, making_ahead(SCHEMA)) == DAYS + 12


def test_open_batch_holds_up_only_the_drop_and_is_held_up_by_nothing(node: Node, connect: Connect) -> None:
    batch, janitor, other = connect(), connect(autocommit=True), connect()
    other.execute("SET lock_timeout = '1ms'")
    deliver(node, "a", "b")
    assert [message.key for message in Inbox("shipping").reap(batch, "a")] == ["a"]
    with janitor.transaction():
        assert run(janitor, making_ahead(SCHEMA, noon(1))) == 1
        [(day, _), *_] = run(janitor, listing_over(SCHEMA, noon(3)))
        assert run(janitor, emptying(SCHEMA, day, noon(3)))
        assert [message.key for message in Inbox("shipping").reap(other, "b")] == ["b"]  # beside the open janitor
    other.commit()
    with pytest.raises(psycopg.errors.LockNotAvailable), janitor.transaction():
        run(janitor, dropping_day(SCHEMA, day, noon(4)))
    batch.commit()
    with janitor.transaction():
        assert run(janitor, dropping_day(SCHEMA, day, noon(4)))
    assert sorted(kept(node)) == [0, 1]  # type: ignore[type-var]


def test_two_janitors_share_the_work(node: Node, connect: Connect) -> None:
    """The second one finds the first one at work and does nothing; then nothing is left to do."""
    first, second = connect(), connect()
    assert run(first, making_ahead(SCHEMA, noon(2))) == 2
    assert run(second, making_ahead(SCHEMA, noon(2))) == 0
    [(day, _), *_] = run(second, listing_over(SCHEMA, noon(3)))
    assert not run(second, emptying(SCHEMA, day, noon(3)))
    second.rollback()
    first.commit()
    assert run(second, making_ahead(SCHEMA, noon(2))) == 0
    assert run(second, emptying(SCHEMA, day, noon(3)))
    assert not run(first, emptying(SCHEMA, day, noon(3)))
    second.commit()
    assert not run(first, emptying(SCHEMA, day, noon(3)))
    assert run(first, dropping_day(SCHEMA, day, noon(4)))
    first.commit()
    assert not run(second, dropping_day(SCHEMA, day, noon(4)))


@pytest.mark.slow
async def test_janitor_turns_the_days(node: Node) -> None:
    """As the owner and as the role of a dispatcher; also one that has just started."""
    with role(node.dsn, *rights("dispatcher", "shipping")) as (_, dsn):
        for url in (node.dsn, dsn):
            node.connection.execute("SELECT mailroom.make_reaped_days(now() - interval '5 days')")
            before = partitions(node)
            assert len(before) == DAYS + 20
            for _ in range(2):
                async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                    await Janitor(SCHEMA).run_once(connection)
                node.connection.execute("UPDATE mailroom.reaped_day SET emptied_at = emptied_at - interval '2 minutes'")
            assert len(partitions(node)) == DAYS + 16


# -- Finding ----------------------------------------------------------------------------------------------------------


def reaped(node: Node) -> list[UUID]:
    """Have six messages reaped, each in a transaction of its own, of two topics and three keys."""
    with node.connection.transaction():
        create_inbox(node.connection, "shipping", ["order.paid"])
    ids = [
        node.send(topic, nth, key=key)
        for nth, (topic, key) in enumerate(
            [("shipping", "a"), ("order.paid", "b"), ("shipping", "a"), ("order.paid", "c"), ("shipping", "b"),
             ("order.paid", "a")]
        )
    ]  # fmt: skip
    node.deliver_all()
    for _ in ids:
        with node.connection.transaction():
            assert len(Inbox("shipping").reap_any(node.connection, 1, 1)) == 1
    return ids


@pytest.mark.slow
def test_find_count_and_replay_what_is_chosen(node: Node, session: Session) -> None:
    ids = reaped(node)
    times = [each.reaped_at for each in SHIPPING.find(node.connection)]
    assert times == sorted(set(times))
    choices: list[tuple[Any, list[int]]] = [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"ids": ids[3]}, [3]),
        ({"ids": [ids[5], ids[0], uuid4()]}, [0, 5]),
        ({"ids": []}, []),
        ({"key": "a"}, [0, 2, 5]),
        ({"topic": "order.paid"}, [1, 3, 5]),
        ({"topic": "order.paid", "key": "a"}, [5]),
        ({"since": times[2]}, [2, 3, 4, 5]),
        ({"until": times[2]}, [0, 1]),
        ({"since": times[1], "until": times[4]}, [1, 2, 3]),
        ({"key": "nobody"}, []),
    ]
    for chosen, values in choices:
        found = SHIPPING.find(session, **chosen)
        assert ([each.message.value for each in found], SHIPPING.count(session, **chosen)) == (
            values, len(values),
        )  # fmt: skip
        assert [each.message.id for each in found] == [ids[nth] for nth in values]
        assert SHIPPING.replay(session, actor="ada", dry_run=True, **chosen) == len(values)
        assert Inbox("shipping").backlog(session) == 0
        assert SHIPPING.replay(session, actor="ada", **chosen) == len(values)
        assert [message.value for message in Inbox("shipping").peek(session)] == values
        session.rollback()
    assert [each.message.value for each in SHIPPING.find(session, limit=2)] == [0, 1]
    assert SHIPPING.replay(session, actor="ada", limit=2, topic="order.paid") == 2
    assert [message.value for message in Inbox("shipping").peek(session)] == [1, 3]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_each_driver(node: Node, dsn: str, kind: str) -> None:
    reaped(node)
    with opened(dsn, kind) as connection:
        assert [each.message.value for each in SHIPPING.find(connection, key="a")] == [0, 2, 5]
        assert SHIPPING.count(connection, since=datetime.now(UTC) - timedelta(hours=1)) == 6
        assert SHIPPING.replay(connection, actor="ada", key="a") == 3
        assert len(Inbox("shipping").reap(connection, "a")) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_each_async_driver(node: Node, dsn: str, kind: str) -> None:
    reaped(node)
    of = AsyncArchive("shipping")
    async with opened_async(dsn, kind) as connection:
        assert [each.message.value for each in await of.find(connection, key="a")] == [0, 2, 5]
        assert await of.count(connection) == 6
        assert await of.replay(connection, actor="ada", key="a") == 3
        assert len(await AsyncInbox("shipping").reap_any(connection)) == 3


def test_wrong_arguments(node: Node) -> None:
    for wrong in ({"ids": "x"}, {"key": ""}, {"topic": " "}, {"since": datetime(2030, 1, 1)}, {"limit": 0}):  # noqa: DTZ001
        with pytest.raises(InvalidMessage):
            SHIPPING.find(node.connection, **wrong)
    with pytest.raises(InvalidMessage):
        SHIPPING.replay(node.connection, actor=" ")
    with pytest.raises(NotInTransaction):
        SHIPPING.replay(node.connection, actor="ada")
    for call in (Archive("nobody").find, Archive("nobody").count):
        with pytest.raises(UnknownInbox):
            call(node.connection)
    with pytest.raises(UnknownInbox), node.connection.transaction():
        Archive("nobody").replay(node.connection, actor="ada")
    assert repr(SHIPPING) == "Archive('shipping', schema='mailroom')"
    assert isinstance(Reaped(None, datetime.now(UTC)), Reaped)  # type: ignore[arg-type]


# -- Replay -----------------------------------------------------------------------------------------------------------


def test_replay_makes_new_messages_of_this_inbox_caused_by_the_old_ones(node: Node, session: Session) -> None:
    node.inbox("other", "order.paid")
    with node.connection.transaction():
        create_inbox(node.connection, "shipping", ["order.paid"])
    headers = {"saga": "s", "causation": str(uuid4()), "note": "x"}
    expires_at = datetime.now(UTC) + timedelta(hours=1)
    ids = deliver(node, *"bab", topic="order.paid", headers=headers, expires_at=expires_at)
    before = Inbox("shipping").reap(session, "b") + Inbox("shipping").reap(session, "a")
    session.commit()
    waiting = deliver(node, "b", topic="shipping")

    assert SHIPPING.replay(session, actor="ada", why="labels were wrong") == 3
    session.commit()
    assert Inbox("other").backlog(node.connection) == 3
    assert node.value("SELECT count(*) FROM mailroom.inbox_shipping WHERE source = 'mailroom archive replay'") == 3
    after = Inbox("shipping").peek(session)
    assert after[0].id == waiting[0]
    assert [message.key for message in after] == [*"bbab"]  # by the clocks that they had
    assert [message.headers for message in after[1:]] == [{**headers, "causation": str(id)} for id in ids]
    assert [message.value for message in after[1:]] == [0, 1, 2]
    assert not {message.id for message in after} & set(ids)
    assert len({message.id for message in after}) == 4
    here = node.value("SELECT id FROM mailroom.node")
    last = max(message.clock for message in before)
    for message in after[1:]:
        assert (message.topic, message.kind, message.expires_at, message.origin) == ("order.paid", "M", None, here)
        assert message.clock == message.sent_clock > last
        assert message.sent_at > before[0].sent_at
    assert {place.id for place in effects(session, ids[1]) if place.where == "inbox"} == {after[2].id}
    assert node.rows(
        "SELECT actor, action, inbox, key, messages, reason FROM mailroom.audit WHERE actor = 'ada' ORDER BY key"
    ) == [
        ("ada", "archive replay", "shipping", "a", 1, "labels were wrong"),
        ("ada", "archive replay", "shipping", "b", 2, "labels were wrong"),
    ]
    assert SHIPPING.count(node.connection) == 3
    # They are reaped and kept like any others, and the next message that is delivered comes after them.
    [next_] = deliver(node, "b", topic="shipping")
    assert [message.id for message in Inbox("shipping").reap(session, "b")][-1] == next_
    Inbox("shipping").reap_any(session)
    session.commit()
    assert SHIPPING.count(node.connection) == 8


def test_replayed_command_is_not_answered_again(node: Node, session: Session) -> None:
    deliver(node, "k", kind="C", headers={"reply_to": "answers", "reply_key": "mine"})
    [command] = Inbox("shipping").reap_any(session)
    assert command.headers["reply_to"] == "answers"
    session.commit()
    assert SHIPPING.replay(session, actor="ada") == 1
    [again] = Inbox("shipping").reap_any(session)
    assert (again.kind, dict(again.headers)) == ("C", {"reply_key": "mine", "causation": str(command.id)})


def test_replay_wakes_sleeping_workers(node: Node, session: Session) -> None:
    node.connection.execute(LEDGER)
    reaped(node)
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        eventually(lambda: is_asleep(node))
        SHIPPING.replay(session, actor="ada", key="c")
        session.commit()
        eventually(lambda: ledger_keys(node) == ["c"])


def test_total_inbox_gets_no_replay(node: Node) -> None:
    node.inbox("ledger", order="total", keep_reaped_days=1)
    with pytest.raises(ConfigurationError) as caught, node.connection.transaction():
        Archive("ledger").replay(node.connection, actor="ada", dry_run=True)
    assert caught.value.code == "MR-replay-total-order"


# -- Where a message is, and inboxes that go --------------------------------------------------------------------------


def test_trace_finds_what_was_reaped_with_its_causes_and_effects(node: Node, session: Session) -> None:
    cause, id = uuid4(), deliver(node, "k", headers={"causation": str(uuid4())})[0]
    [message] = Inbox("shipping").reap_any(session)
    follows = Outbox().send(session, "shipping", 1, key="k", headers={"causation": str(id)})
    assert [place.where for place in trace(node.connection, id)] == ["inbox"]
    session.commit()
    node.deliver_all()
    Inbox("shipping").reap_any(session)
    session.commit()
    [place] = trace(node.connection, id)
    assert (place.where, place.inbox, place.key, place.clock) == ("reaped", "shipping", "k", message.clock)
    assert abs(place.since - datetime.now(UTC)) < timedelta(minutes=1)
    assert (place.ahead, place.attempts, place.reason) == (None, None, None)
    assert place.causation == UUID(message.headers["causation"]) != cause
    assert [(each.where, each.id) for each in effects(node.connection, id)] == [("reaped", follows)]
    assert [(each.where, each.id) for each in causes(node.connection, follows)] == [("reaped", id)]


def test_trace_reads_the_archive_by_its_indexes(node: Node) -> None:
    with node.connection.transaction():
        node.connection.execute("SET LOCAL enable_seqscan = off")
        for statement, values in (
            (TRACE.at(schema=SCHEMA, but="''"), {"ids": [uuid4()]}),
            (CAUSED.at(schema=SCHEMA, but="''"), {"causes": [str(uuid4())], "most": 9}),
        ):
            explained = node.connection.execute(f"EXPLAIN {statement.sql}".encode(), values)
            plan = "\n".join(line for (line,) in explained)
            assert "on reaped_2" in plan
            assert "Seq Scan on reaped_2" not in plan


@pytest.mark.slow
def test_archive_goes_along_with_a_rename_and_outlives_its_inbox(node: Node) -> None:
    reaped(node)
    with node.connection.transaction():
        rename_inbox(node.connection, "shipping", "dispatch", actor="ada")
    assert kept(node, "dispatch") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UnknownInbox):
        kept(node)
    deliver(node, "z", topic="dispatch")
    with node.connection.transaction():
        assert len(Inbox("dispatch").reap_any(node.connection)) == 1
    assert len(kept(node, "dispatch")) == 7

    with node.connection.transaction():
        assert drop_inbox(node.connection, "dispatch", actor="ada") == 0
    assert len(kept(node, "dispatch")) == 7
    with pytest.raises(UnknownInbox), node.connection.transaction():
        Archive("dispatch").replay(node.connection, actor="ada")
    node.inbox("dispatch")
    assert len(kept(node, "dispatch")) == 7


def test_failing_key_heals_with_what_is_kept(node: Node, session: Session) -> None:
    """A key that failed in a batch is taken in batches again, and all of it is kept."""
    deliver(node, *"kkk")
    fail(node, "k")
    claims = Claims(SCHEMA, "shipping")
    taken = run(session, claims.claiming_due(5)).messages
    run(session, healing(SCHEMA, "shipping", taken[-1]))
    session.commit()
    assert kept(node) == [message.value for message in taken]
