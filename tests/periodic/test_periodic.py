"""`Periodic` and `mailroom periodic`: what is defined, by whom, and what is refused."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from mailroom import Topic
from mailroom.errors import (
    ConfigurationError,
    EncodeError,
    InvalidMessage,
    InvalidName,
    MailroomError,
    NotInTransaction,
    UnknownPeriodic,
)
from outbox import AsyncPeriodic, Periodic, PeriodicMessage
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import Node
from tests.support.waiting import wait_until_blocked

PERIODIC = Periodic()
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
HOURLY = PeriodicMessage("hourly", "@hourly", "report.due", {"depth": 1}, key="k", headers={"user": "ada"})


def add(connection: Any, message: PeriodicMessage = HOURLY, now: datetime = NOON) -> str:
    return PERIODIC.add(connection, message, actor="ada", why="reports", now=now)


def change(connection: Any, message: PeriodicMessage, now: datetime = NOON) -> str:
    return "changed" if PERIODIC.set(connection, message, actor="ada", now=now) else "unchanged"


def audited(node: Node) -> list[Any]:
    return node.rows("SELECT actor, action, key, coalesce(change, reason) FROM mailroom.audit ORDER BY id")


# -- Adding ------------------------------------------------------------------------------------------------------------


def test_same_definition_changes_nothing_and_another_one_says_so(node: Node) -> None:
    with node.connection.transaction():
        assert add(node.connection) == "added"
        assert add(node.connection, now=NOON + HOUR) == "unchanged"
        for changed in (
            replace(HOURLY, value={"depth": 2}), replace(HOURLY, key=None), replace(HOURLY, headers=None),
            replace(HOURLY, topic="other"), replace(HOURLY, kind="E"), replace(HOURLY, missed="all"),
        ):  # fmt: skip
            with pytest.raises(ConfigurationError, match="mailroom periodic set hourly"):
                add(node.connection, changed, NOON + HOUR)
            assert change(node.connection, changed, NOON + HOUR) == "changed"
            assert add(node.connection, changed, NOON + HOUR) == "unchanged"
    [state] = PERIODIC.list(node.connection)
    assert (state.due_at, state.missed, state.key) == (NOON + HOUR, "all", "k")  # the next time stays
    [added, *changes] = audited(node)
    assert added == ("ada", "periodic add", "hourly", "reports")
    assert {act for _, act, _, _ in changes} == {"periodic set"}
    assert [change for *_, change in changes] == [
        "its value or headers", "key k -> none", "key none -> k", "topic report.due -> other",
        "topic other -> report.due, kind M -> E", "kind E -> M, missed once -> all",
    ]  # fmt: skip
    with pytest.raises(UnknownPeriodic), node.connection.transaction():
        change(node.connection, replace(HOURLY, name="daily"))


def test_other_cron_or_zone_begins_with_its_next_time_and_other_jitter_delays_this_one(node: Node) -> None:
    with node.connection.transaction():
        add(node.connection)
        assert change(node.connection, replace(HOURLY, jitter_s=600), NOON + 5 * HOUR) == "changed"
        [state] = PERIODIC.list(node.connection)
        assert state.due_at == NOON + HOUR < state.next_at < NOON + 2 * HOUR
        assert change(node.connection, replace(HOURLY, cron="0 0 * * *"), NOON) == "changed"
        assert PERIODIC.list(node.connection)[0].due_at == NOON + 12 * HOUR
        assert change(node.connection, replace(HOURLY, cron="0 0 * * *", time_zone="Europe/Paris"), NOON) == "changed"
        assert PERIODIC.list(node.connection)[0].due_at == NOON + 11 * HOUR


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_all_is_done_over_any_driver(dsn: str, kind: str) -> None:
    with opened(dsn, kind) as connection:
        assert PERIODIC.sync(connection, [HOURLY, replace(HOURLY, name="a")], actor="ada") == {
            "a": "added", "hourly": "added",
        }  # fmt: skip
        assert change(connection, replace(HOURLY, value=b"x")) == "changed"
        assert PERIODIC.pause(connection, "a", actor="ada")
        assert [(each.name, each.paused, each.kind) for each in PERIODIC.list(connection)] == [
            ("a", True, "M"), ("hourly", False, "M"),
        ]  # fmt: skip
        assert PERIODIC.resume(connection, "a", actor="ada")
        assert PERIODIC.next_times(connection, "a", 2, now=NOON) == [NOON + HOUR, NOON + 2 * HOUR]
        PERIODIC.remove(connection, "a", actor="ada")
        assert [each.name for each in PERIODIC.list(connection)] == ["hourly"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_all_is_done_over_any_async_driver(dsn: str, kind: str) -> None:
    periodic = AsyncPeriodic()
    async with opened_async(dsn, kind) as connection:
        assert await periodic.sync(connection, [HOURLY], actor="ada") == {"hourly": "added"}
        assert await periodic.add(connection, HOURLY, actor="ada") == "unchanged"
        assert await periodic.pause(connection, "hourly", actor="ada")
        assert await periodic.resume(connection, "hourly", actor="ada")
        assert await periodic.next_times(connection, "hourly", 1, now=NOON) == [NOON + HOUR]
        [state] = await periodic.list(connection)
        assert (state.cron, state.time_zone, state.last_at, state.last_error) == ("@hourly", "UTC", None, None)
        await periodic.remove(connection, "hourly", actor="ada")
        assert await periodic.list(connection) == []


@pytest.mark.parametrize(("first_commits", "second"), [(True, "unchanged"), (False, "added")])
def test_programs_that_start_at_once_add_it_once(
    node: Node, connect: Connect, first_commits: bool, second: str
) -> None:
    one, other = connect(), connect()
    add(one)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(add, other)
        wait_until_blocked(node.connection, other.info.backend_pid)
        one.commit() if first_commits else one.rollback()
        assert waiting.result() == second
    other.commit()
    assert len(PERIODIC.list(node.connection)) == 1
    assert len(audited(node)) == 1


def test_one_that_is_ended_while_another_program_adds_it_is_added_again(node: Node, connect: Connect) -> None:
    with node.connection.transaction():
        add(node.connection)
    one, other = connect(), connect()
    PERIODIC.remove(one, "hourly", actor="ada")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(add, other)
        wait_until_blocked(node.connection, other.info.backend_pid)
        one.commit()
        assert waiting.result() == "added"
    other.commit()


def test_what_is_declared_twice_or_is_something_else_is_refused(node: Node) -> None:
    with node.connection.transaction():
        with pytest.raises(InvalidMessage, match="hourly is declared twice"):
            PERIODIC.sync(node.connection, [HOURLY, replace(HOURLY, cron="@daily")], actor="ada")
        with pytest.raises(InvalidMessage, match="such as Topic"):
            PERIODIC.sync(node.connection, ["hourly"], actor="ada")  # type: ignore[list-item]
    with pytest.raises(NotInTransaction):
        add(node.connection)
    with pytest.raises(InvalidMessage, match="actor"):
        PERIODIC.add(node.connection, HOURLY, actor=" ")


# -- Pausing, ending ---------------------------------------------------------------------------------------------------


def test_resumed_one_goes_on_with_its_next_time(node: Node) -> None:
    with node.connection.transaction():
        add(node.connection, replace(HOURLY, missed="all"))
        assert PERIODIC.pause(node.connection, "hourly", actor="ada", why="rebuilding")
        assert not PERIODIC.pause(node.connection, "hourly", actor="ada")
        assert PERIODIC.resume(node.connection, "hourly", actor="ada", now=NOON + SECOND)
        assert PERIODIC.list(node.connection)[0].due_at == NOON + HOUR  # nothing has passed
        assert not PERIODIC.resume(node.connection, "hourly", actor="ada")
        PERIODIC.pause(node.connection, "hourly", actor="ada")
        assert PERIODIC.resume(node.connection, "hourly", actor="ada", now=NOON + 5 * HOUR)
        assert PERIODIC.list(node.connection)[0].due_at == NOON + 6 * HOUR
        PERIODIC.remove(node.connection, "hourly", actor="ada", why="nobody reads it")
    actions = [action.removeprefix("periodic ") for _, action, _, _ in audited(node)]
    assert actions == ["add", "pause", "resume", "pause", "resume", "remove"]
    assert audited(node)[-1] == ("ada", "periodic remove", "hourly", "nobody reads it")


def test_unknown_one_is_told(node: Node) -> None:
    acts: list[Callable[..., Any]] = [PERIODIC.pause, PERIODIC.resume, PERIODIC.remove]
    for act in acts:
        with node.connection.transaction(), pytest.raises(UnknownPeriodic, match="mailroom periodic list"):
            act(node.connection, "nightly", actor="ada")
    with pytest.raises(UnknownPeriodic):
        PERIODIC.next_times(node.connection, "nightly")


def test_next_times_are_those_of_the_zone(node: Node) -> None:
    with node.connection.transaction():
        add(node.connection, replace(HOURLY, cron="30 2 * * *", time_zone="Europe/Paris"))
    found = PERIODIC.next_times(node.connection, "hourly", 2, now=datetime(2026, 3, 28, 12, tzinfo=UTC))
    assert [each.isoformat() for each in found] == ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]
    node.connection.execute("SET TIME ZONE 'Europe/Paris'")  # the driver gives times of that zone then
    found = PERIODIC.next_times(node.connection, "hourly", 2)
    assert found[1].astimezone(UTC) - found[0].astimezone(UTC) in (23 * HOUR, 24 * HOUR, 25 * HOUR)


# -- What is refused ---------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], type[MailroomError], str]] = [
    ({"name": "a b"}, InvalidName, "periodic message"),
    ({"name": ""}, InvalidName, "periodic message"),
    ({"cron": "soon"}, InvalidMessage, "Cron expression 'soon'"),
    ({"time_zone": "Paris"}, InvalidMessage, "Time zone 'Paris'"),
    ({"topic": "a b"}, InvalidMessage, "Topic"),
    ({"topic": Topic("t", int)}, InvalidMessage, "Topic"),
    ({"key": "k" * 1_025}, InvalidMessage, "Key"),
    ({"value": object()}, EncodeError, "object"),
    ({"headers": {"a": 1}}, InvalidMessage, "Header"),
    ({"headers": {"a": "b" * 8_130}}, InvalidMessage, "8192 are allowed"),
    ({"kind": "R"}, InvalidMessage, "kind 'R' is none of M, E, C"),
    ({"missed": "never"}, InvalidMessage, "missed 'never' is none of skip, once, all"),
    ({"jitter_s": 3_601}, InvalidMessage, "jitter_s"),
    ({"jitter_s": float("nan")}, InvalidMessage, "jitter_s"),
]


def test_declaration_that_could_not_be_sent_is_refused_where_it_stands() -> None:
    for fields, error, why in REFUSED:
        with pytest.raises(error, match=why):
            replace(HOURLY, **fields)


def test_typed_value_is_checked_where_it_is_declared() -> None:
    @dataclass
    class Report:
        depth: int

    topic = Topic("report.due", Report, version=2)
    declared = topic.periodic("nightly", "@daily", Report(3), headers={"user": "ada"}, jitter_s=5)
    assert (declared.topic, declared.value, declared.jitter_s) == ("report.due", {"depth": 3}, 5)
    assert declared.headers == {"user": "ada", "schema": "2"}
    with pytest.raises(EncodeError):
        topic.periodic("nightly", "@daily", Report("deep"))  # type: ignore[arg-type]
    assert "3" not in repr(declared)


def test_table_keeps_the_rules_too(node: Node) -> None:
    with node.connection.transaction():
        add(node.connection)
    for columns in ("name = 'a b'", "kind = 'R'", "missed = 'never'", "jitter_s = -1", "jitter_s = 'NaN'"):
        with pytest.raises(psycopg.errors.CheckViolation):
            node.connection.execute(f"UPDATE mailroom.periodic SET {columns}".encode())


# -- The command -------------------------------------------------------------------------------------------------------


def test_command_does_what_the_class_does(node: Node) -> None:
    dsn = node.dsn
    assert "There are no periodic messages" in done("periodic", "list", dsn=dsn)
    arguments = (
        "periodic", "add", "nightly", "30 2 * * *", "report.due", "--value", '{"depth": 3}', "--key", "k",
        "--header", "user=ada", "--kind", "event", "--time-zone", "Europe/Paris", "--missed", "skip",
        "--jitter-s", "60", "--actor", "ada", "--why", "reports",
    )  # fmt: skip
    assert done(*arguments, dsn=dsn).startswith("nightly is added. Its next time is ")
    assert json_of(*arguments, dsn=dsn)["done"] == "unchanged"
    other = ["set" if word == "add" else "60 s" if word == "reports" else word for word in arguments]
    assert done(*other, dsn=dsn).startswith("nightly: nothing to change. Its next time is ")
    [listed] = json_of("periodic", "list", dsn=dsn)
    assert (listed["cron"], listed["kind"], listed["key"], listed["missed"]) == ("30 2 * * *", "E", "k", "skip")
    assert node.rows("SELECT headers ->> 'user', jitter_s FROM mailroom.periodic") == [("ada", 60.0)]
    text = done("periodic", "list", dsn=dsn)
    assert all(word in text for word in ("nightly", "30 2 * * *", "Europe/Paris", "report.due", "event", "on"))
    lines = done("periodic", "next", "nightly", "--limit", "3", dsn=dsn).splitlines()
    assert len(lines) == 3
    assert all(line.endswith("  Europe/Paris") for line in lines)
    assert len(json_of("periodic", "next", "nightly", dsn=dsn)) == 10
    assert done("periodic", "pause", "nightly", dsn=dsn) == "nightly is paused.\n"
    assert "nothing is changed" in done("periodic", "pause", "nightly", dsn=dsn)
    assert "paused" in done("periodic", "list", dsn=dsn)
    assert json_of("periodic", "resume", "nightly", dsn=dsn) == {"name": "nightly", "changed": True}
    node.connection.execute("UPDATE mailroom.periodic SET last_error = 'refused'")
    assert "failing: refused" in done("periodic", "list", dsn=dsn)
    assert done("periodic", "remove", "nightly", "--why", "done with it", dsn=dsn) == "nightly is removed.\n"
    assert [action for _, action, _, _ in audited(node)] == [
        "periodic add", "periodic pause", "periodic resume", "periodic remove",
    ]  # fmt: skip
    assert audited(node)[0] == ("ada", "periodic add", "nightly", "reports")


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("add", "a b", "@daily", "t"), "Name 'a b' of a periodic message"),
    (("add", "a", "daily", "t"), "Cron expression 'daily' is not valid"),
    (("add", "a", "@daily", "t", "--time-zone", "Paris"), "Time zone 'Paris' is not known"),
    (("add", "a", "@daily", "t", "--value", "{"), "not JSON"),
    (("add", "a", "@daily", "t", "--jitter-s", "4000"), "jitter_s"),
    (("add", "a", "@daily", "t", "--header", "a=b", "--header", "a=c"), "given twice"),
    (("next", "nightly"), "There is no periodic message 'nightly'"),
]


def test_command_says_what_is_wrong(node: Node) -> None:
    for arguments, why in WRONG:
        assert why in error_of(mailroom("periodic", *arguments, dsn=node.dsn))
