"""`mailroom parked` and `mailroom dead-letter`: what operators see and do, from a shell."""

import getpass
import json
import os
import platform
from typing import Any

import pytest

from inbox import Inbox, Park, Retry, Skip
from mailroom import __version__
from mailroom.sql.runner import run
from tests.support.command import done, json_of, mailroom, untold
from tests.support.node import Node, failing

INBOX = Inbox("shipping")
ME = f"{getpass.getuser()}@{platform.node()}"


pytestmark = pytest.mark.inbox("shipping")


def fail(node: Node, key: str, error: Exception) -> None:
    with node.connection.transaction():
        [message] = INBOX.peek(node.connection, key, limit=1)
        run(node.connection, failing("shipping", message, error))


@pytest.fixture
def held(node: Node) -> Node:
    """A node with the parked keys a (three messages) and b (one), whose reasons differ."""
    for value, key in enumerate("aaab"):
        node.send("shipping", value, key=key)
    node.deliver_all()
    fail(node, "a", Retry(0, "try later"))
    fail(node, "a", Park("no such street"))
    fail(node, "b", Park("no such town"))
    return node


@pytest.fixture
def dead(node: Node) -> Node:
    """A node with two dead letters: 1 was not delivered, 2 was skipped by `shipping`."""
    node.send("nobody", {"order": 1}, key="k", headers={"user": "ada"})
    node.send("shipping", {"order": 2}, key="k")
    node.deliver_all()
    fail(node, "k", Skip("no such street"))
    return node


def parked(node: Node) -> list[str]:
    return [each["key"] for each in json_of("parked", "list", "shipping", dsn=node.dsn)]


def audited(node: Node, columns: str = "actor, action, key, messages, reason") -> list[Any]:
    return node.rows(f"SELECT {columns} FROM mailroom.audit ORDER BY id")


# -- parked -----------------------------------------------------------------------------------------------------------


def test_list_tells_of_every_parked_key_why(held: Node) -> None:
    text = done("parked", "list", "shipping", dsn=held.dsn)
    assert "no such street" in text
    assert "no such town" in text
    first, second = json_of("parked", "list", "shipping", dsn=held.dsn)
    assert (first["key"], first["messages"], first["clock"], first["attempts"]) == ("a", 3, 1, 2)
    assert (second["key"], second["reason"]) == ("b", "no such town")


def test_list_without_an_inbox_tells_of_all(held: Node) -> None:
    node = held
    node.inbox("billing", on_failure="park")
    node.inbox("idle")
    node.send("billing", key="c")
    node.deliver_all()
    with node.connection.transaction():
        [message] = Inbox("billing").peek(node.connection, "c")
        run(node.connection, failing("billing", message, Park("no such town")))
    found = json_of("parked", "list", dsn=node.dsn)
    assert [(each["inbox"], each["key"]) for each in found] == [("billing", "c"), ("shipping", "a"), ("shipping", "b")]
    narrowed = json_of("parked", "list", "--matching", "town", "--limit", "1", dsn=node.dsn)
    assert [(each["inbox"], each["key"]) for each in narrowed] == [("billing", "c"), ("shipping", "b")]
    lines = done("parked", "list", dsn=node.dsn).splitlines()
    assert lines[0].split()[:2] == ["inbox", "key"]
    assert [line.split()[0] for line in lines[2:]] == ["billing", "shipping", "shipping"]
    assert done("parked", "list", "--matching", "x", dsn=node.dsn) == (
        "No inbox has a parked key whose reason contains 'x'.\n"
    )


def test_list_may_be_narrowed(held: Node) -> None:
    assert [each["key"] for each in json_of("parked", "list", "shipping", "--matching", "town", dsn=held.dsn)] == ["b"]
    assert [each["key"] for each in json_of("parked", "list", "shipping", "--limit", "1", dsn=held.dsn)] == ["a"]
    assert "no parked keys whose reason contains 'x'" in done(
        "parked", "list", "shipping", "--matching", "x", dsn=held.dsn
    )


def test_show_tells_the_history_and_the_messages(held: Node) -> None:
    text = done("parked", "show", "shipping", "--key", "a", dsn=held.dsn)
    assert "try later" in text
    assert text.count("key a  ") == 3
    found = json_of("parked", "show", "shipping", "--key", "a", "--limit", "2", dsn=held.dsn)
    assert [message["value"] for message in found["messages"]] == [0, 1]
    assert [(each["attempt"], each["outcome"]) for each in found["attempts"]] == [(2, "park"), (1, "retry")]
    recorder = f"{__version__} {os.getpid()}@{platform.node()}"
    assert {" ".join(each["worker"].split(" ")[-2:]) for each in found["attempts"]} == {recorder}
    assert found["parked"]["messages"] == 3


def test_replay_of_a_key_brings_it_back_and_is_audited_as_mine(held: Node) -> None:
    text = done("parked", "replay", "shipping", "--key", "a", "--why", "mended", dsn=held.dsn)
    assert text == "3 messages of 1 parked key replayed; 1 key no longer parked.\n"
    assert parked(held) == ["b"]
    assert [message.value for message in INBOX.peek(held.connection)] == [0, 1, 2]
    assert audited(held) == [(ME, "parked replay", "a", 3, "mended")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("target", "left"),
    [
        (["--key", "a", "--key", "b"], []),
        (["--all"], []),
        (["--matching", "no such"], []),
        (["--matching", "town"], ["a"]),
        (["--key", "a", "--matching", "town"], ["a", "b"]),
        (["--all", "--limit", "1"], ["b"]),
    ],
    ids=str,
)
def test_replay_takes_what_is_named(held: Node, target: list[str], left: list[str]) -> None:
    result = mailroom("parked", "replay", "shipping", *target, "--actor", "ada", dsn=held.dsn)
    assert result.exit_code == (1 if len(left) == 2 else 0)
    assert parked(held) == left
    assert {actor for (actor,) in audited(held, "actor")} <= {"ada"}


def test_discarding_the_first_and_replaying_goes_on_with_the_next(held: Node) -> None:
    arguments = ("parked", "discard", "shipping", "--key", "a", "--per-key", "1")
    would = {"keys": 1, "messages": 1, "freed": 0, "dry_run": True}
    assert json_of(*arguments, "--dry-run", dsn=held.dsn) == would
    assert json_of(*arguments, dsn=held.dsn) == would | {"dry_run": False}
    done("parked", "replay", "shipping", "--key", "a", dsn=held.dsn)
    assert [message.value for message in INBOX.peek(held.connection)] == [1, 2]


def test_dry_run_of_a_parked_key_changes_nothing(held: Node) -> None:
    for command in ("replay", "discard"):
        text = done("parked", command, "shipping", "--all", "--dry-run", dsn=held.dsn)
        assert f"4 messages of 2 parked keys would be {command}" in text
    assert (parked(held), audited(held)) == (["a", "b"], [])


NO_TARGETS: tuple[list[str], ...] = (
    [],
    ["--limit", "1"],
    ["--dry-run"],
    ["--all", "--key", "a"],
    ["--all", "--matching", "x"],
)


def test_parked_command_without_one_target_is_wrong_usage(held: Node) -> None:
    commands = [("parked", command, "shipping", *target) for command in ("replay", "discard") for target in NO_TARGETS]
    assert untold([(command, 2, "Say which keys") for command in commands], held.dsn) == []
    assert parked(held) == ["a", "b"]


NONE_PARKED = [
    (["--key", "typo"], "Key 'typo' is not parked in inbox shipping."),
    (["--matching", "tax"], "Inbox shipping has no parked key whose reason contains 'tax'."),
    (["--key", "x", "--key", "y"], "Inbox shipping has no parked key among 'x', 'y'."),
    (["--key", "a", "--matching", "town"], "Inbox shipping has no parked key among 'a' whose reason contains 'town'."),
]


def test_choice_that_selects_no_parked_key_is_told(held: Node) -> None:
    see = " See: mailroom parked list shipping"
    calls: list[tuple[tuple[str, ...], int, str]] = [
        (("parked", command, "shipping", *target), 1, told + see)
        for command in ("replay", "discard")
        for target, told in NONE_PARKED
    ]
    calls.append((("parked", "show", "shipping", "--key", "typo"), 1, NONE_PARKED[0][1] + see))
    assert untold(calls, held.dsn) == []


@pytest.mark.parametrize("command", ["replay", "discard"])
def test_key_that_is_not_parked_is_told_beside_one_that_is(held: Node, command: str) -> None:
    result = mailroom("parked", command, "shipping", "--key", "a", "--key", "typo", dsn=held.dsn)
    assert (result.exit_code, parked(held)) == (0, ["b"])
    assert result.stderr == "Only 1 of the 2 keys are chosen. See: mailroom parked list shipping\n"


BAD = [
    (["parked", "list", "nowhere"], 1, "no inbox 'nowhere'"),
    (["parked", "list", "No Where"], 2, "not valid"),
    (["parked", "replay", "shipping", "--all", "--limit", "0"], 2, "--limit"),
    (["parked", "replay", "shipping", "--all", "--actor", " "], 2, "who acts"),
    (["parked", "replay", "shipping", "--key", ""], 2, "0 bytes"),
    (["parked", "show", "shipping"], 2, "--key"),
]


def test_bad_input_is_told(held: Node) -> None:
    assert untold(BAD, held.dsn) == []


# -- dead-letter ------------------------------------------------------------------------------------------------------


def letters(node: Node) -> list[int]:
    return [each["id"] for each in json_of("dead-letter", "list", dsn=node.dsn)]


def test_list_tells_of_every_dead_letter_why(dead: Node) -> None:
    text = done("dead-letter", "list", dsn=dead.dsn)
    assert "no inbox gets this topic" in text
    assert "no such street" in text
    [second] = json_of("dead-letter", "list", "--inbox", "shipping", dsn=dead.dsn)
    assert (second["id"], second["stage"], second["attempts"]) == (2, "reap", 1)
    assert "no dead letters whose reason contains 'tax'" in done(
        "dead-letter", "list", "--matching", "tax", dsn=dead.dsn
    )


def test_dead_letter_is_shown_with_its_value(dead: Node) -> None:
    text = done("dead-letter", "show", "1", dsn=dead.dsn)
    assert "could not be delivered" in text
    assert '{"order": 1}' in text
    assert "user: ada" in text
    found = json_of("dead-letter", "show", "2", dsn=dead.dsn)
    assert (found["value"], found["inbox"], found["clock"]) == ({"order": 2}, "shipping", 2)
    assert "was skipped by inbox shipping" in done("dead-letter", "show", "2", dsn=dead.dsn)


def test_value_that_cannot_be_read_is_shown_raw(dead: Node) -> None:
    dead.connection.execute("UPDATE mailroom.dead_letter SET value = '\\xff' WHERE id = 1")
    assert json_of("dead-letter", "show", "1", dsn=dead.dsn)["raw"] == "/w=="
    assert "/w==" in done("dead-letter", "show", "1", dsn=dead.dsn)


def test_requeue_of_a_skipped_message_brings_it_back_and_is_audited_as_mine(dead: Node) -> None:
    assert done("dead-letter", "requeue", "2", "--why", "mended", dsn=dead.dsn) == "1 dead letter requeued.\n"
    assert letters(dead) == [1]
    assert [message.value for message in INBOX.peek(dead.connection)] == [{"order": 2}]
    assert audited(dead) == [(ME, "dead-letter requeue", None, 1, "mended")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("target", "left"),
    [
        (["1", "2"], []),
        (["--all"], []),
        (["--all", "--limit", "1"], [2]),
        (["--stage", "reap"], [1]),
        (["--inbox", "shipping"], [1]),
        (["--matching", "street"], [1]),
        (["1", "--matching", "street"], [1, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["requeue", "discard"])
def test_command_takes_the_dead_letters_that_are_named(
    dead: Node, command: str, target: list[str], left: list[int]
) -> None:
    result = mailroom("dead-letter", command, *target, "--dry-run", "--actor", "ada", dsn=dead.dsn)
    assert result.exit_code == (1 if len(left) == 2 else 0)
    assert (letters(dead), audited(dead)) == ([1, 2], [])
    mailroom("dead-letter", command, *target, "--actor", "ada", dsn=dead.dsn)
    assert letters(dead) == left
    assert {actor for (actor,) in audited(dead, "actor")} <= {"ada"}


NO_CHOICES: tuple[list[str], ...] = ([], ["--limit", "1"], ["--dry-run"], ["--all", "1"], ["--all", "--stage", "reap"])


def test_dead_letter_command_without_one_target_is_wrong_usage(dead: Node) -> None:
    commands = [("dead-letter", command, *target) for command in ("requeue", "discard") for target in NO_CHOICES]
    assert untold([(command, 2, "Say which dead letters") for command in commands], dead.dsn) == []
    assert letters(dead) == [1, 2]


NONE_DEAD = [
    (["99"], " of number 99"),
    (["--matching", "tax"], " whose reason contains 'tax'"),
    (["8", "9"], " of number 8, 9"),
    (["--stage", "execute", "--inbox", "shipping"], " of stage execute that inbox shipping skipped"),
]


def test_choice_that_selects_no_dead_letter_is_told(dead: Node) -> None:
    see = ". See: mailroom dead-letter list"
    calls: list[tuple[tuple[str, ...], int, str]] = [
        (("dead-letter", command, *target), 1, f"There is no dead letter{told}{see}")
        for command in ("requeue", "discard")
        for target, told in NONE_DEAD
    ]
    calls.append((("dead-letter", "show", "99"), 1, f"There is no dead letter of number 99{see}"))
    assert untold(calls, dead.dsn) == []


@pytest.mark.parametrize("command", ["requeue", "discard"])
def test_dead_letter_that_is_not_there_is_told_beside_one_that_is(dead: Node, command: str) -> None:
    result = mailroom("dead-letter", command, "1", "7", dsn=dead.dsn)
    assert (result.exit_code, letters(dead)) == (0, [2])
    assert "Only 1 of the 2 dead letters are there." in result.stderr


def test_what_was_changed_is_told_to_programs(dead: Node) -> None:
    told = json.loads(done("dead-letter", "discard", "--all", "--json", dsn=dead.dsn))
    assert told == {"messages": 2, "dry_run": False}


def test_user_without_a_name_acts_by_number(held: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    done("parked", "replay", "shipping", "--all", dsn=held.dsn)
    assert {actor.partition(" ")[0] for (actor,) in audited(held, "actor")} == {"uid"}


def test_audit_tells_who_did_what_and_why(held: Node) -> None:
    done("parked", "replay", "shipping", "--key", "a", "--actor", "ann", "--why", "a new street", dsn=held.dsn)
    done("parked", "discard", "shipping", "--key", "b", "--actor", "bob", dsn=held.dsn)
    everything = json_of("audit", dsn=held.dsn)
    assert [(each["actor"], each["action"], each["inbox"], each["key"]) for each in everything[:2]] == [
        ("bob", "parked discard", "shipping", "b"), ("ann", "parked replay", "shipping", "a"),
    ]  # fmt: skip
    assert everything[1]["messages"] == 3
    assert json_of("audit", "--inbox", "shipping", "--key", "a", dsn=held.dsn) == everything[1:2]
    assert json_of("audit", "--limit", "1", dsn=held.dsn) == everything[:1]
    assert "a new street" in done("audit", "--inbox", "shipping", dsn=held.dsn)
    assert done("audit", "--inbox", "billing", dsn=held.dsn) == "Nothing was done by hand.\n"
