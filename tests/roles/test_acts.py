"""Acts: each change of a node by hand is in the audit under the words of its command, with what is different now."""

from collections.abc import Iterator

import click
import psycopg
import pytest

from mailroom.cli.root import root
from mailroom.roles.advice import COMMANDS
from mailroom.roles.matrix import PURPOSES
from mailroom.schema.acts import ACTS
from tests.support.command import done
from tests.support.node import Node

# What takes --actor is an act. These change a node too, and are no acts: messages come and go, as by any program.
TRAFFIC = {
    "outbox send", "inbox reap", "dispatcher run", "dispatcher deliver-all", "executor run", "executor execute-all",
    "worker run", "bridge serve", "dashboard", "demo", "bench",
}  # fmt: skip
LOOKS = {
    "archive list", "asyncapi", "audit", "bridge brokers", "bridge show", "bridge status", "bridge test", "completion",
    "dead-letter list",
    "dead-letter show", "dispatcher status", "doctor", "embedded dsn", "embedded psql", "embedded status",
    "embedded stop", "executor function list", "executor status", "executor target list", "explain", "health",
    "inbox failing", "inbox list", "inbox paused", "inbox peek", "link report", "link status", "log list", "log status",
    "parked list",
    "parked show", "periodic list", "periodic next", "statistics", "status", "tail", "top", "trace", "worker list",
}  # fmt: skip


def commands(of: click.Command, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield each command with its words."""
    if not isinstance(of, click.Group):
        yield words, of
        return
    for name in of.list_commands(click.Context(of)):
        command = of.get_command(click.Context(of), name)
        assert command is not None
        yield from commands(command, f"{words} {name}".strip())


def test_each_command_is_an_act_or_changes_nothing_by_hand() -> None:
    takes_actor = {words for words, each in commands(root) if any(option.name == "actor" for option in each.params)}
    by_hand = [act.words for act in ACTS if not act.words.startswith("dispatcher ")]
    assert sorted(by_hand) == sorted(takes_actor)
    assert {words for words, _ in commands(root)} - takes_actor == TRAFFIC | LOOKS


def test_who_may_act_is_a_purpose_and_is_told_so() -> None:
    assert {act.purpose for act in ACTS} - {None} <= set(PURPOSES)
    assert {act.words for act in ACTS if act.purpose} <= set(COMMANDS)


def test_what_makes_and_changes_is_audited_with_what_is_different(node: Node) -> None:
    node.connection.execute("CREATE TABLE public.lines (id bigint PRIMARY KEY)")
    by = ("--actor", "ada", "--why", "shop")
    for command in (
        ("inbox", "create", "shipping", "billing", "--subscribe", "order.paid", "--rate", "5"),
        ("inbox", "create", "shipping", "--subscribe", "order.paid", "--rate", "5"),
        ("inbox", "create", "shipping", "--subscribe", "order.sent"),
        ("inbox", "set", "shipping", "--rate", "10", "--burst", "20", "--on-failure", "skip"),
        ("inbox", "set", "shipping", "--rate", "10", "--burst", "20"),
        ("inbox", "subscribe", "shipping", "order.#", "order.sent"),
        ("inbox", "unsubscribe", "shipping", "order.#", "other"),
        ("watch", "public.lines", "--topic", "line"),
        ("watch", "public.lines", "--topic", "line", "--key-prefix", "x-"),
        ("unwatch", "public.lines"),
        ("migrate",),
    ):
        done(*command, *by, dsn=node.dsn)
    rows = node.rows(
        "SELECT action, inbox, key, change FROM mailroom.audit WHERE (actor, reason) = ('ada', 'shop') ORDER BY id"
    )
    made = "order key, rate none -> 5, subscribed to order.paid"
    assert rows == [
        ("inbox create", "shipping", None, made),
        ("inbox create", "billing", None, made),
        ("inbox subscribe", "shipping", None, "order.sent"),
        ("inbox set", "shipping", None, "on_failure park -> skip, rate 5 -> 10, burst 5 -> 20"),
        ("inbox subscribe", "shipping", None, "order.#"),
        ("inbox unsubscribe", "shipping", None, "order.#"),
        ("watch", None, "public.lines", "none -> topic line"),
        ("watch", None, "public.lines", "topic line -> topic line, key prefix x-"),
        ("unwatch", None, "public.lines", "topic line, key prefix x- -> none"),
    ]


def test_links_and_bridges_are_audited_with_what_is_different(node: Node) -> None:
    for command in (
        ("link", "allow", "south", "--topics", "order.#"),
        ("link", "set", "south", "--max-rows", "1000"),
        ("link", "add", "north", "--service", "hq", "--as", "me"),
        ("link", "set", "north", "--service", "hq2", "--as", "me"),
        ("bridge", "out", "hooks", "--webhook", "https://shop.example/hooks", "--subscribe", "order.paid"),
        ("bridge", "set", "hooks", "--address", "https://shop.example/new", "--keep-s", "60"),
        ("bridge", "in", "stock", "--kafka", "localhost:9092", "--from", "stock"),
        ("bridge", "set", "stock", "--from", "stock,levels", "--on-failure", "stop"),
    ):
        done(*command, "--actor", "ada", dsn=node.dsn)
    rows = node.rows("SELECT action, key, change FROM mailroom.audit WHERE actor = 'ada' ORDER BY id")
    assert rows == [
        ("link allow", "south", "keep_s 172800, topics order.#"),
        ("link set", "south", "max_rows none -> 1000"),
        ("link add", "north", "service hq, source_schema mailroom, reader me"),
        ("link set", "north", "service hq -> hq2"),
        (
            "bridge out", "hooks", ("broker webhook, address https://shop.example/hooks, topic {topic}, "
            "format cloudevents, encode json, tombstones no, exactly_once no, on_failure stop, keep_s 0, "
            "topics order.paid"),
        ),
        ("bridge set", "hooks", "address https://shop.example/hooks -> https://shop.example/new, keep_s 0 -> 60"),
        (
            "bridge in", "stock", ("broker kafka, address localhost:9092, topics stock, key record, decode auto, "
            "start earliest, on_failure skip, max_origins 1000"),
        ),
        ("bridge set", "stock", "topics stock -> stock levels, on_failure skip -> stop"),
    ]  # fmt: skip


@pytest.mark.slow
def test_migration_is_audited(empty_dsn: str) -> None:
    done("migrate", "--actor", "o'hara", "--why", "it's new", dsn=empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        found = connection.execute("SELECT actor, action, change, reason FROM mailroom.audit").fetchall()
    assert found == [("o'hara", "migrate", "none -> 0152", "it's new")]
