"""A breaker for each prefix of a key: only the keys of a prefix that fails wait, in order, and one of them is tried."""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.housekeeping import healthy_floor
from inbox import Inbox, Message, Worker, breakers, limits
from inbox.by_key import claim as claim_by_key
from inbox.by_key.claim import PIN, Share
from inbox.claims import Claims
from inbox.worker import limiting, outcomes
from inbox.worker.outcomes import LEAST, MOST_PREFIXES, ByPrefix
from mailroom import create_inbox, drop_inbox, events, rename_inbox, set_inbox
from mailroom.errors import ConfigurationError
from mailroom.metrics.catalog import INBOX_BREAKER_OPEN, reading_catalog
from mailroom.node.status import status
from mailroom.registry.breakers import Prefix, closing_prefixes, prefix_of
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.explain import nodes
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually, wait_until_blocked
from tests.support.working import LEDGER, NEVER_S, NO_TRY_BY_ITSELF, deliver, ledger_keys, working, write_ledger

pytestmark = [
    pytest.mark.inbox("shipping", backoff_s=0, breaker=50, breaker_by="/"),
    pytest.mark.node_sql(LEDGER, CLOCKS_ALLOWED),
]

Session = psycopg.Connection[Any]
INBOX = Inbox("shipping")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers look often, and count all attempts, however long the test takes."""
    monkeypatch.setattr(limiting, "LOOK_S", 0.05)
    monkeypatch.setattr(outcomes, "WINDOW_S", NEVER_S)


def deliver_many(node: Node, keys: list[str]) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, key, value_json) SELECT 'shipping', unnest(%s::text[]), '1'", [keys]
    )
    node.deliver_all()


def limit(node: Node, breaker: int = 50, breaker_by: str | None = "/", **given: Any) -> None:
    with node.connection.transaction():
        set_inbox(node.connection, "shipping", breaker=breaker, breaker_by=breaker_by, **given)


def opened(node: Node, prefix: str, separator: str = "/") -> bool:
    with node.connection.transaction():
        return run(node.connection, breakers.opening_prefix(SCHEMA, "shipping", Prefix(prefix, separator), "why"))


def defer(connection: Session, before: breakers.Deferred = breakers.NOTHING) -> breakers.Deferred:
    with connection.transaction():
        return run(connection, breakers.deferring(SCHEMA, "shipping", before))


def grant(connection: Session, prefix: str) -> bool:
    with connection.transaction():
        return run(connection, breakers.granting(SCHEMA, "shipping", prefix))


def close(connection: Session, prefix: str) -> bool:
    with connection.transaction():
        return run(connection, breakers.closing_prefix(SCHEMA, "shipping", prefix))


def due_now(node: Node, prefix: str) -> None:
    node.connection.execute("UPDATE mailroom.breaker SET try_at = clock_timestamp() WHERE prefix = %s", [prefix])


def claim(connection: Session, number: int = 100, *, due: bool = False) -> list[str]:
    """Claim in the transaction that is open, as a worker does."""
    claims = Claims(SCHEMA, "shipping")
    if due:
        return [each.key for each in run(connection, claims.claiming_due(number)).messages]
    share = Share(number, number, number, due_too=False)
    return [each.key for each in run(connection, claims.claiming(share)).messages]


def pause(node: Node, key: str, **given: Any) -> bool:
    with node.connection.transaction():
        return INBOX.pause(node.connection, key, **given)


def resume(node: Node, key: str | None = None, **given: Any) -> bool:
    with node.connection.transaction():
        return INBOX.resume(node.connection, key, **given)


def waiting(node: Node) -> list[str]:
    """Return the keys that wait for so long that workers leave them: any other key is put off when they look."""
    soon = f"interval '{2 * limits.LONGEST_TRY_S} s'"
    wait = f"retry_at > now() + {soon} AND retry_at < 'infinity'"
    return [key for (key,) in node.rows(f"SELECT key FROM mailroom.key_state WHERE {wait} ORDER BY key")]


# -- The prefix, and what is counted ----------------------------------------------------------------------------------


def test_prefix_is_what_comes_before_the_first_separator() -> None:
    given = ["a/1", "a", "a/b/c", "/x", "", "a-b/1"]
    assert [prefix_of(key, "/") for key in given] == ["a", "a", "a", "", "", "a-b"]


def test_bounds_hold_the_keys_of_a_prefix_and_no_others(node: Node) -> None:
    keys = ["a", "a+", "a-b/1", "a/", "a/1", "a/b/c", "a0", "ab", "A/1", "a/\U0010ffff", "b/a/1"]
    deliver(node, *keys)
    opened(node, "a")
    defer(node.connection)
    assert waiting(node) == sorted((key for key in keys if prefix_of(key, "/") == "a"), key=str.encode)


def test_attempts_are_counted_by_prefix_and_only_of_those_that_fail() -> None:
    now = [0.0]
    counted = ByPrefix(lambda: now[0])
    counted.handled(["well"] * 1_000)
    for _ in range(LEAST - 1):
        assert not counted.failed("a").tripped(50)
    counted.handled(["a", "well"])
    assert counted.failed("a").tripped(95)
    assert not counted.failed("b").tripped(1)
    assert not counted.failed("well").tripped(1)  # what was handled before is not counted, and so does not delay it
    now[0] = 61.0
    counted.handled(["a"])  # a minute later all is well: it is counted no more
    assert counted.failed("a").attempts == 1
    counted.clear("a")
    for nth in range(MOST_PREFIXES):
        counted.failed(f"p{nth}")
        counted.failed("often")
    assert counted.failed("often").attempts == MOST_PREFIXES + 1
    assert counted.failed("p0").attempts == 1  # it was dropped: it had failed least recently


# -- What waits -------------------------------------------------------------------------------------------------------


def test_keys_of_an_open_prefix_wait_and_others_do_not(node: Node, connect: Connect) -> None:
    deliver(node, "a/1", "b/1", "a/2", "a/1")
    assert opened(node, "a")
    assert not opened(node, "a")
    before = defer(node.connection)
    with connect() as one:
        assert claim(one) == ["b/1"]
        one.rollback()
        # What comes later waits too, and so does a key that fails now. What was looked through is not looked at again.
        deliver(node, "a/3", "b/2", "a")
        node.connection.execute(
            "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, last_error) "
            "VALUES ('shipping', 'a/0', 1, 3, now(), 'down')"
        )
        after = defer(one, before)
        assert after.clock > before.clock
        assert claim(one) == ["b/1", "b/2"]
        assert claim(one, due=True) == []
        one.rollback()
    assert waiting(node) == ["a", "a/0", "a/1", "a/2", "a/3"]
    assert node.value("SELECT last_error FROM mailroom.key_state WHERE key = 'a/0'") == "down"
    assert close(node.connection, "a")
    assert not close(node.connection, "a")
    # Those that waited for nothing else are healthy again, and the failing one is due.
    assert node.rows("SELECT key, retry_at <= clock_timestamp() FROM mailroom.key_state") == [("a/0", True)]
    with connect() as one:
        assert claim(one) == ["a/1", "b/1", "a/2", "a/1", "a/3", "b/2", "a"]


def test_a_worker_that_comes_later_goes_through_all_keys_in_steps(node: Node) -> None:
    keys = [f"a/{nth:04}" for nth in range(2 * breakers.AT_ONCE + 3)]
    deliver_many(node, keys)
    opened(node, "a")
    defer(node.connection)
    assert waiting(node) == keys
    # A breaker that was closed and opened again is another one.
    seen = defer(node.connection)
    close(node.connection, "a")
    opened(node, "a")
    defer(node.connection, seen)
    assert waiting(node) == keys


def test_what_arrives_in_number_is_gone_through_in_steps(node: Node) -> None:
    deliver(node, "b/0", "a/0")
    opened(node, "a")
    seen = defer(node.connection)
    keys = [f"{'ab'[nth % 2]}/{nth:04}" for nth in range(2 * breakers.AT_ONCE + 2)]
    deliver_many(node, keys)
    defer(node.connection, seen)
    assert waiting(node) == sorted({"a/0", *(key for key in keys if key[0] == "a")})


def test_pauses_and_parked_keys_stay_whatever_the_breaker_does(node: Node) -> None:
    deliver(node, "a/1", "a/2", "a/3", "a/4")
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at) "
        "VALUES ('shipping', 'a/1', 1, 3, 'infinity', now())"
    )
    pause(node, "a/2", actor="anna")
    opened(node, "a")
    defer(node.connection)
    pause(node, "a/3", actor="anna")  # while it waits because of the breaker
    pause(node, "a/4", actor="anna")
    resume(node, "a/4", actor="anna")  # it waits for the breaker still
    assert waiting(node) == ["a/4"]
    close(node.connection, "a")
    held = "SELECT key FROM mailroom.key_state WHERE retry_at = 'infinity' ORDER BY key"
    assert node.rows(held) == [("a/1",), ("a/2",), ("a/3",)]
    assert node.value("SELECT parked_at FROM mailroom.key_state WHERE key = 'a/1'") is not None
    resume(node, "a/3", actor="anna")
    resume(node, "a/2", actor="anna")
    assert waiting(node) == []
    with node.connection.transaction():
        claimed = claim(node.connection) + claim(node.connection, due=True) + claim(node.connection, due=True)
    assert sorted(claimed) == ["a/2", "a/3", "a/4"]


def test_key_below_the_healthy_floor_is_handled_after_the_breaker_closes(node: Node, connect: Connect) -> None:
    deliver(node, "a/1", "a/2")
    opened(node, "a")
    defer(node.connection)
    with node.connection.transaction():
        run(node.connection, healthy_floor.raising(SCHEMA, "shipping"))
    assert node.value("SELECT healthy_floor FROM mailroom.inbox_registry") > 0
    deliver(node, "a/1")
    close(node.connection, "a")
    with connect() as one:
        assert claim(one) == []  # no later message overtakes one below the floor
        assert [claim(one, due=True), claim(one, due=True)] == [["a/1", "a/1"], ["a/2"]]


# -- The try ----------------------------------------------------------------------------------------------------------


@pytest.mark.node_sql(NO_TRY_BY_ITSELF)
def test_one_message_is_tried_at_a_time(node: Node, connect: Connect) -> None:
    deliver(node, "a/1", "a/1", "a/2", "b/1")
    opened(node, "a")
    with connect() as one, connect() as two:
        defer(one)
        assert not grant(one, "a")
        due_now(node, "a")
        assert grant(one, "a")
        assert not grant(two, "a")  # its time has moved on
        defer(two)  # and what is to be tried is not put off by others
        assert claim(one, due=True) == ["a/1"]
        assert claim(two, due=True) == []
        two.rollback()
        # As long as somebody has it, no other one is given, though it is time.
        due_now(node, "a")
        assert not grant(two, "a")
        one.rollback()
        # Nobody has tried it: now it is one of those that wait, until it is given again.
        assert grant(two, "a")
        assert node.rows("SELECT key FROM mailroom.key_state WHERE retry_at <= clock_timestamp()") == [("a/1",)]
        # It fails. The next one is another key.
        with node.connection.transaction():
            run(node.connection, breakers.failing_try(SCHEMA, "shipping", "a", "a/1"))
            node.connection.execute("UPDATE mailroom.key_state SET attempts = 1 WHERE key = 'a/1'")
        defer(one)
        assert waiting(node) == ["a/1", "a/2"]
        due_now(node, "a")
        assert grant(one, "a")
        assert claim(two, due=True) == ["a/2"]


def test_pause_between_tries_doubles_and_is_bounded(node: Node) -> None:
    deliver(node, "a/1")
    opened(node, "a")
    defer(node.connection)
    waits = []
    [(now,)] = node.rows("SELECT try_at FROM mailroom.breaker")
    for _ in range(7):
        with node.connection.transaction():
            assert run(node.connection, breakers.granting(SCHEMA, "shipping", "a", now))
        [(then,)] = node.rows("SELECT try_at FROM mailroom.breaker")
        waits.append((then - now).total_seconds())
        now = then + timedelta(microseconds=1)
    assert waits == [20, 40, 80, 160, 300, 300, 300]
    for ahead_s, is_due in ((299, False), (301, True)):  # no pause is longer: the clock was set back
        with node.connection.transaction(force_rollback=True):
            at = then - timedelta(seconds=ahead_s)
            assert run(node.connection, breakers.granting(SCHEMA, "shipping", "a", at)) == is_due


def test_nothing_is_tried_in_a_paused_inbox_or_of_nothing(node: Node) -> None:
    opened(node, "a")
    due_now(node, "a")
    defer(node.connection)
    assert not grant(node.connection, "a")
    deliver(node, "a/1")
    defer(node.connection)
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = now()")
    assert not grant(node.connection, "a")
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = NULL")
    assert grant(node.connection, "a")


def test_closing_waits_for_who_has_keys_wait_and_not_the_other_way_round(node: Node, connect: Connect) -> None:
    deliver(node, "a/1")
    opened(node, "a")
    with connect() as one, connect() as two:
        run(one, breakers.deferring(SCHEMA, "shipping"))  # its transaction is open
        closer = threading.Thread(target=close, args=(two, "a"))
        closer.start()
        wait_until_blocked(node.connection, two.info.backend_pid)
        one.commit()
        closer.join(WITHIN_S)
        assert not closer.is_alive()
    assert node.rows("SELECT key FROM mailroom.key_state") == []


# -- Workers ----------------------------------------------------------------------------------------------------------


class Handler:
    """Fails for the prefixes that are down, and writes what it handles to the ledger."""

    def __init__(self, *down: str) -> None:
        self.down = set(down)
        self.tried: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, message: Message, connection: Any) -> None:
        with self._lock:
            self.tried.append(message.key)
        if prefix_of(message.key, "/") in self.down:
            raise ValueError("the carrier is down")
        write_ledger(message, connection)

    def of(self, prefix: str) -> list[str]:
        return [key for key in self.tried if prefix_of(key, "/") == prefix]


@pytest.fixture
def turns() -> Iterator[list[events.BreakerTurned]]:
    heard: list[events.BreakerTurned] = []
    end = events.subscribe(heard.append, events.BreakerTurned)
    yield heard
    end()


def is_open(node: Node) -> list[str]:
    return [prefix for (prefix,) in node.rows("SELECT prefix FROM mailroom.breaker ORDER BY prefix")]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.node_sql(NO_TRY_BY_ITSELF)
def test_workers_stop_one_prefix_try_one_and_go_on(
    node: Node, caplog: pytest.LogCaptureFixture, turns: list[events.BreakerTurned]
) -> None:
    caplog.set_level(logging.INFO, "mailroom.worker")
    node.inbox("shipping", backoff_s=3_600)
    # More keys than two workers have failed with by the time that one of them has failed 20 times.
    sent = [f"{prefix}/{nth % 60}" for nth in range(120) for prefix in ("down", "well")]
    deliver(node, *sent)
    handler = Handler("down")
    workers = [Worker(node.dsn, "shipping", handler, batch=4, poll_interval_s=0.1) for _ in range(2)]
    with working(workers[0]), working(workers[1]):
        eventually(lambda: is_open(node) == ["down"])
        eventually(lambda: len(ledger_keys(node)) == 120)
        deliver(node, *(f"down/new{nth}" for nth in range(5)), *(f"well/new{nth}" for nth in range(5)))
        eventually(lambda: len(ledger_keys(node)) == 125)
        eventually(lambda: len(waiting(node)) == 65)
        # What comes later waits as well, but for what a worker claims between its look at breakers and its claim.
        assert len([key for key in handler.of("down") if "new" in key]) <= len(workers)
        due_now(node, "down")
        eventually(lambda: node.rows("SELECT tries, trying FROM mailroom.breaker") == [(1, None)])
        assert len(handler.of("down")) < 60
        [shown] = status(node.connection).inboxes
        assert shown.breaker_opened_at is not None
        assert (shown.breaker_why or "").startswith("prefix down: ")
        assert dict(run(node.connection, reading_catalog(SCHEMA))[INBOX_BREAKER_OPEN]) == {("shipping",): 1}
        handler.down.clear()
        due_now(node, "down")
        eventually(lambda: is_open(node) == [])
        eventually(lambda: len(ledger_keys(node)) == 250)
    assert [(each.is_open, each.prefix) for each in turns] == [(True, "down"), (False, "down")]
    assert Counter(ledger_keys(node)) == Counter(
        sent + [f"{prefix}/new{nth}" for prefix in ("down", "well") for nth in range(5)]
    )
    in_order = node.rows("SELECT key, clock FROM ledger ORDER BY nth")
    for _, of_key in itertools.groupby(sorted(in_order, key=lambda row: row[0]), key=lambda row: row[0]):
        clocks = [clock for _, clock in of_key]
        assert clocks == sorted(clocks)
    assert node.rows("SELECT * FROM mailroom.inbox WHERE inbox = 'shipping'") == []
    texts = [each.getMessage() for each in caplog.records]
    [told] = [each for each in texts if "is open" in each]
    assert "the breaker of prefix 'down' is open" in told
    assert "carrier" not in told
    assert len([each for each in texts if "the breaker of prefix 'down' is closed" in each]) == 1


@pytest.mark.usefixtures("quick")
def test_try_whose_worker_died_is_made_by_another(node: Node, connect: Connect) -> None:
    deliver(node, "a/1", "a/2")
    opened(node, "a")
    dying = connect()
    defer(dying)
    due_now(node, "a")
    assert grant(dying, "a")
    assert claim(dying, due=True) == ["a/1"]
    node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [dying.info.backend_pid])
    due_now(node, "a")
    handler = Handler()
    with working(Worker(node.dsn, "shipping", handler, poll_interval_s=0.1)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a/1", "a/2"])
    assert is_open(node) == []


def test_resume_closes_all_and_is_audited(node: Node) -> None:
    deliver(node, "a/1", "b/1", "c/1")
    opened(node, "a")
    opened(node, "b")
    defer(node.connection)
    assert len(waiting(node)) == 2
    assert resume(node, actor="anna", why="the carrier is back")
    assert not resume(node, actor="anna")
    assert is_open(node) == waiting(node) == []
    assert node.rows("SELECT actor, action, inbox FROM mailroom.audit") == [("anna", "inbox resume", "shipping")]


@pytest.mark.parametrize("given", [{"breaker": 0, "breaker_by": None}, {"breaker_by": ":"}, {"breaker_by": ""}])
def test_a_setting_that_ends_closes_what_it_has_opened(node: Node, given: dict[str, Any]) -> None:
    deliver(node, "a/1", "b/1")
    opened(node, "a")
    defer(node.connection)
    limit(node, breaker=60, breaker_by=None)
    limit(node, breaker=60)
    assert is_open(node) == ["a"]
    limit(node, **given)
    assert is_open(node) == waiting(node) == []
    assert not opened(node, "a")
    by = given["breaker_by"] if given.get("breaker") != 0 else None
    assert node.value("SELECT breaker_by FROM mailroom.limits") == (by or None)


def test_a_change_of_the_setting_and_an_opening_wait_for_each_other(node: Node, connect: Connect) -> None:
    with connect() as one:
        set_inbox(one, "shipping", breaker=50, breaker_by=":")
        found: list[bool] = []
        opener = threading.Thread(target=lambda: found.append(opened(node, "a")))
        opener.start()
        with connect(autocommit=True) as two:
            wait_until_blocked(two, node.connection.info.backend_pid)
        one.commit()
        opener.join(WITHIN_S)
    assert found == [False]


def test_wrong_separators_are_refused(node: Node) -> None:
    for given in ("//", " ", "é", "\n", 5, b"/"):
        with pytest.raises(ConfigurationError, match="breaker_by"):
            limit(node, breaker_by=given)  # type: ignore[arg-type]
    for breaker in (None, 0):
        with pytest.raises(ConfigurationError, match="give both"):
            limit(node, breaker=breaker)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="total order"), node.connection.transaction():
        create_inbox(node.connection, "ledger", order="total", breaker=50, breaker_by="/")


def test_an_inbox_takes_its_open_breakers_along(node: Node) -> None:
    deliver(node, "a/1")
    opened(node, "a")
    with node.connection.transaction():
        rename_inbox(node.connection, "shipping", "sending", actor="anna")
    assert node.rows("SELECT inbox, prefix FROM mailroom.breaker") == [("sending", "a")]
    with node.connection.transaction():
        drop_inbox(node.connection, "sending", discard=True, actor="anna")
    assert is_open(node) == []


# -- What it costs others ---------------------------------------------------------------------------------------------


def test_many_open_prefixes_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.breaker (inbox, prefix, separator, opened_at, opened_why, try_at) "
        "SELECT 'shipping', 'p' || nth, '/', now(), 'why', now() FROM generate_series(1, %s) AS nth",
        [breakers.MOST_OPEN - 1],
    )
    assert opened(node, "a")
    assert not opened(node, "b")
    with node.connection.transaction():
        assert len(run(node.connection, closing_prefixes(SCHEMA, "shipping", by_hand=True))) == breakers.MOST_OPEN


def rows_read(connection: Session, statement: str, values: dict[str, str]) -> int:
    """Return how many rows of the tables a statement reads, planned as where workers run it."""
    for name, value in values.items():
        statement = statement.replace(f"%({name})s", value)
    with connection.transaction(force_rollback=True):
        connection.execute(PIN.at().sql.encode())
        row = connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {statement.replace('%%', '%')}".encode()).fetchone()
    assert row is not None
    tables = ("inbox_shipping", "key_state", "inbox_registry")
    scans = [node for node in nodes(row[0][0]["Plan"]) if node.get("Relation Name") in tables]
    return int(
        sum((scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0)) * scan["Actual Loops"] for scan in scans)
    )


def test_thousands_of_waiting_keys_cost_the_claims_of_others_nothing(node: Node) -> None:
    deliver_many(node, [f"a/{nth:04}" for nth in range(5_000)])
    opened(node, "a")
    seen = defer(node.connection)
    with node.connection.transaction():
        assert run(node.connection, healthy_floor.raising(SCHEMA, "shipping", 5_000))
    deliver_many(node, ["b/1"])
    names = {"schema": SCHEMA, "inbox": "shipping"}
    claims = (
        claim_by_key.REAP_ANY.at(**names, **Share(100, 100, 100, due_too=False).names()).sql,
        claim_by_key.REAP_PLAIN.at(**names, **Share(100, 100, 100, due_too=False).names()).sql,
        breakers.NEWEST.at(**names).sql,
        breakers.ARRIVED.at(**names).sql,
        breakers.PUT_OFF.at(**names).sql,
    )
    values = {"cursor": "''", "depth": "1", "mine": "'{}'", "but": "'{}'", "now": "NULL", "why": "'why'"}
    values |= {"separator": "'/'", "prefixes": "'{a}'", "trying": "'{}'", "after": str(seen.clock)}
    read = [rows_read(node.connection, statement, values) for statement in claims]
    assert max(read) < 20, read
