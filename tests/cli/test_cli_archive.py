"""`mailroom archive`, `mailroom inbox create --keep-reaped-days` and `mailroom trace` of what was reaped."""

import json
from uuid import UUID, uuid4

import pytest

from inbox import Inbox
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import Node
from tests.support.roles import rights, role


@pytest.fixture
def ids(node: Node) -> list[UUID]:
    """Two messages that were reaped, of the keys a and b; their values are 0 and 1."""
    done("inbox", "create", "shipping", "--keep-reaped-days", "2", dsn=node.dsn)
    ids = [node.send("shipping", nth, key=key, headers={"saga": "s"}) for nth, key in enumerate("ab")]
    node.deliver_all()
    done("inbox", "reap", "shipping", "--any", dsn=node.dsn)
    return ids


def test_setting_is_shown_and_ended(node: Node, ids: list[UUID]) -> None:
    [shown] = json_of("inbox", "list", dsn=node.dsn)
    assert shown["keep_reaped_days"] == 2
    assert "keep_reaped_days 2" in done("inbox", "list", dsn=node.dsn)
    done("inbox", "set", "shipping", "--keep-reaped-days", "0", dsn=node.dsn)
    assert json_of("inbox", "list", dsn=node.dsn)[0]["keep_reaped_days"] is None
    assert mailroom("inbox", "create", "shipping", "--keep-reaped-days", "367", dsn=node.dsn).exit_code == 2


def test_list_tells_what_was_reaped(node: Node, ids: list[UUID]) -> None:
    text = done("archive", "list", "shipping", dsn=node.dsn, COLUMNS="200")
    assert [str(id) in text for id in ids] == [True, True]
    found = json_of("archive", "list", "shipping", "--key", "b", dsn=node.dsn)
    assert [(each["id"], each["value"], each["headers"]) for each in found] == [(str(ids[1]), 1, {"saga": "s"})]
    reaped_at = found[0]["reaped_at"]
    assert json_of("archive", "list", "shipping", "--until", "2020-01-01T00:00:00Z", dsn=node.dsn) == []
    assert len(json_of("archive", "list", "shipping", "--since", reaped_at, "--limit", "1", dsn=node.dsn)) == 1
    nothing = done("archive", "list", "shipping", "--topic", "order.paid", "--key", "a", dsn=node.dsn)
    assert nothing == "Nothing that was reaped from inbox shipping and is kept with key 'a' with topic order.paid.\n"
    assert "There is no inbox 'nobody'" in error_of(mailroom("archive", "list", "nobody", dsn=node.dsn))
    wrong = mailroom("archive", "list", "shipping", "--since", "2030-01-31T09:00:00", dsn=node.dsn)
    assert "is not a time: give one with its zone" in error_of(wrong)


def test_auditor_lists_all_but_the_values(node: Node, ids: list[UUID]) -> None:
    with role(node.dsn, *rights("auditor")) as (_, auditor):
        text = done("archive", "list", "shipping", dsn=auditor, COLUMNS="200")
        told = mailroom("archive", "list", "shipping", "--json", dsn=auditor)
    assert [str(id) in text for id in ids] == [True, True]
    found = json.loads(told.stdout)
    assert [each["headers"] for each in found] == [{"saga": "s"}] * 2
    assert not any("value" in each or "raw" in each for each in found)
    assert "Values are left out" in told.stderr


def test_replay_of_what_is_chosen(node: Node, ids: list[UUID]) -> None:
    command = ("archive", "replay", "shipping")
    say = "1 message would be replayed into inbox shipping.\n"
    assert done(*command, "--id", str(ids[0]), "--dry-run", dsn=node.dsn) == say
    assert Inbox("shipping").backlog(node.connection) == 0
    assert json_of(*command, "--id", str(ids[0]), "--actor", "ada", "--why", "label", dsn=node.dsn) == {
        "inbox": "shipping", "messages": 1, "dry_run": False,
    }  # fmt: skip
    [message] = Inbox("shipping").peek(node.connection)
    assert (message.value, message.headers) == (0, {"saga": "s", "causation": str(ids[0])})
    assert node.rows("SELECT actor, action, inbox, key, messages, reason FROM mailroom.audit WHERE actor = 'ada'") == [
        ("ada", "archive replay", "shipping", "a", 1, "label")
    ]
    assert done(*command, "--all", "--limit", "1", dsn=node.dsn) == "1 message replayed into inbox shipping.\n"
    for wrong in ([], ["--all", "--key", "a"]):
        assert "Say which messages" in error_of(mailroom(*command, *wrong, dsn=node.dsn))
    assert "keeps no reaped message with key 'z'. See: mailroom archive list shipping" in error_of(
        mailroom(*command, "--key", "z", dsn=node.dsn)
    )


def test_trace_tells_what_became_of_it(node: Node, ids: list[UUID]) -> None:
    text = done("trace", str(ids[0]), dsn=node.dsn)
    assert text.startswith(f"{ids[0]} was reaped from inbox shipping with clock ")
    found = json.loads(done("trace", str(ids[0]), "--json", dsn=node.dsn))
    assert [place["where"] for place in found["places"]] == ["reaped"]
    assert "it was reaped" in error_of(mailroom("trace", str(uuid4()), dsn=node.dsn))
    late = error_of(mailroom("outbox", "cancel", str(ids[0]), dsn=node.dsn))
    assert late == f"Message {ids[0]} is not cancelled: it is reaped from inbox shipping."
