"""A lane that fails each time: its lease tells with what, until it works again, and never a value of a message."""

import asyncio

import psycopg
import pytest

from dispatcher import Dispatcher
from dispatcher.lanes import failure
from dispatcher.lanes.failure import RepeatedFailure, described
from mailroom.doctor import Limits, examine
from mailroom.node.status import LaneFailure, dispatcher_status
from mailroom.roles import grant
from tests.support.command import done
from tests.support.node import Node
from tests.support.roles import rights, role
from tests.support.waiting import eventually_async


def test_it_is_told_until_the_lane_works_or_it_does_not_strike_again() -> None:
    at = 100.0
    told = RepeatedFailure("dispatcher", "mailroom", lambda: at)
    assert told.told() == {}
    told.struck(ValueError("secret"), "ada")
    assert told.told() == {}  # a lock for a moment is no failure
    at = 105.0
    told.struck(ValueError("secret"), "ada")
    at = 107.0
    told.worked()  # in between: what fails beside it will strike again
    assert told.told() == {"failing": {"why": "ValueError", "run": "", "times": 2, "for_s": 7.0}}
    at = 105.0 + failure.YOUNG_S + 1
    told.worked()
    assert told.told() == {}
    for _ in range(2):
        told.struck(ValueError("secret"), "ada")
    assert told.told()
    at += failure.OVER_AFTER_S + 1
    assert told.told() == {}


def test_text_of_an_error_is_told_where_it_has_no_value(node: Node) -> None:
    errors = []
    for statement in ("SELECT 'secret'::integer", "SET statement_timeout = 1; SELECT pg_sleep(60)"):
        with pytest.raises(psycopg.Error) as raised:
            node.connection.execute(statement.encode())
        errors.append(described(raised.value))
    assert errors == [
        "InvalidTextRepresentation (22P02)",
        "QueryCanceled (57014): canceling statement due to statement timeout",
    ]


@pytest.mark.slow
@pytest.mark.inbox("shipping")
async def test_leader_that_lacks_a_right_looks_well_nowhere(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "YOUNG_S", 0.0)
    with role(node.dsn, *rights("dispatcher", "shipping")) as (name, dsn):
        dispatcher = Dispatcher(dsn, poll_interval_s=0.05)
        running = asyncio.create_task(dispatcher.run())
        try:
            await eventually_async(lambda: dispatcher.health().has_begun and node.rows("SELECT FROM mailroom.lease"))
            node.connection.execute(f"REVOKE INSERT ON mailroom.inbox FROM {name}")
            node.send("shipping")

            def told() -> LaneFailure | None:
                found = dispatcher_status(node.connection)
                return None if found is None else found.failing

            fails = await eventually_async(told)
            assert fails is not None
            assert fails.why == "InsufficientPrivilege (42501): permission denied for table inbox"
            assert fails.run == f"mailroom grant dispatcher {name}"
            text = await asyncio.to_thread(done, "dispatcher", "status", dsn=node.dsn)
            assert f"{fails.why}: {fails.run}" in " ".join(text.split())
            with node.connection.transaction():
                found = {each.id: each for each in examine(node.connection, limits=Limits(lease_s=0))}
            assert found["M023"].command == fails.run
            assert fails.why in found["M023"].evidence[0]
            with node.connection.transaction():
                grant(node.connection, "dispatcher", name, actor="ada")
            await eventually_async(lambda: not node.waiting() and told() is None)
        finally:
            dispatcher.stop()
            await running
