"""Whatever a command prints for people fits the screen, however long the names are."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from inbox import Inbox, Park, Retry, Skip
from inbox.cli.tail import tail
from mailroom.cli.call import Call
from mailroom.cli.commands.completion import completion
from mailroom.cli.options import share
from mailroom.cli.root import root
from mailroom.sql.runner import run
from tests.support.command import mailroom
from tests.support.node import Node, failing

WIDTHS = (60, 80, 120)
SHIPPING, LEDGER, AUDIT = "s" * 41, "t" * 41, "a" * 41
TOPIC = "order." + "p" * 194
KEY, TAME = "k" * 255, "order 42 " * 28
NODE = "n" * 40
REASON = "no such street: " + "x" * 300
# Content is printed whole: it may be all that is left of a message.
VALUE = {"n": 1}


def fill(node: Node) -> list[list[str]]:
    """Fill every table that a command shows; return the calls that show them."""
    node.inbox(SHIPPING, TOPIC, "order.#")
    node.inbox(AUDIT, TOPIC, on_failure="skip", expire_s=3_600)
    node.inbox(LEDGER, TOPIC, order="total")
    for key in (KEY, KEY, TAME):
        parked = node.send(TOPIC, VALUE, key=key, headers={"user": "ada"})
    node.send("n." + "o" * 190, VALUE, key=KEY)
    node.deliver_all()
    for inbox, errors in (
        (SHIPPING, (Retry(0, REASON), Park(REASON))),
        (AUDIT, (Skip(REASON),)),
        (SHIPPING, (Park("it rains"),)),
    ):
        for error in errors:
            with node.connection.transaction():
                key = TAME if str(error) == "it rains" else KEY
                [message] = Inbox(inbox).peek(node.connection, key, limit=1)
                run(node.connection, failing(inbox, message, error))
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, last_error, parked_at) "
        "VALUES (%s, '', 1, 16, 'infinity', %s, now())",
        [LEDGER, REASON],
    )
    node.connection.execute(
        f"CREATE TABLE public.{'w' * 60} ({'c' * 60} text NOT NULL PRIMARY KEY, {'d' * 60} bigint);"
        f"CREATE FUNCTION public.{'f' * 60}(jsonb) RETURNS void LANGUAGE sql AS '';"
    )
    node.send(TOPIC, VALUE, key=KEY)
    held = "--key", KEY
    changes = [
        ["executor", "target", "add", "g" * 41, f"public.{'w' * 60}", "--key", "c" * 60, "--number", "d" * 60],
        ["executor", "function", "add", "h" * 41, f"public.{'f' * 60}"],
        ["watch", f"public.{'w' * 60}", "--topic", "watched", "--key-prefix", "z" * 60],
        ["link", "allow", NODE, "--topics", TOPIC, "--topics", "order.#"],
        ["link", "add", NODE, "--as", "m" * 40],
        ["inbox", "subscribe", SHIPPING, TOPIC, "--origin", NODE, "--no-wait"],
        ["inbox", "create", "q" * 41, "--subscribe", TOPIC],
    ]
    shows = [
        ["status"], ["dispatcher", "status"], ["executor", "status"], ["inbox", "list"], ["inbox", "peek", SHIPPING],
        ["inbox", "peek", LEDGER], ["parked", "list"], ["parked", "list", SHIPPING], ["parked", "list", "q" * 41],
        ["parked", "show", SHIPPING, *held], ["parked", "show", LEDGER], ["parked", "replay", SHIPPING, *held],
        ["parked", "discard", SHIPPING, "--matching", "street"], ["dead-letter", "list"], ["dead-letter", "show", "1"],
        ["dead-letter", "show", "2"], ["dead-letter", "requeue", "1"], ["dead-letter", "discard", "2"],
        ["trace", str(parked)], ["link", "status"], ["link", "report", NODE], ["link", "cut", NODE],
        ["link", "remove", NODE, "--reader"], ["link", "exclude", NODE], ["executor", "target", "list"],
        ["executor", "target", "remove", "g" * 41], ["executor", "function", "list"],
        ["executor", "function", "remove", "h" * 41], ["watch", "--list"], ["node", "rename", NODE],
        ["node", "moved"], ["node", "restored"], ["node", "advance", "1000000"], ["node", "new-id"], ["migrate"],
        ["explain", "MR-not-parked"],
        ["tail", SHIPPING, "--since", "3600", "--limit", "1"],
    ]  # fmt: skip
    return [*changes, *(each + ["--dry-run"] * takes_dry_run(each) for each in shows)]


def takes_dry_run(call: list[str]) -> bool:
    return call[0] == "node" or not {"replay", "discard", "requeue", "cut", "remove", "exclude"}.isdisjoint(call)


def is_table(call: list[str]) -> bool:
    return not {"status", "list", "--list", "show", "peek", "trace", "tail"}.isdisjoint(call)


def helps(command: click.Command, parent: click.Context | None, name: str) -> Iterator[tuple[str, str]]:
    """Yield path and help of a command and of all commands below it; click's test runner would fix the width."""
    context = command.context_class(command, parent=parent, info_name=name, **command.context_settings)
    yield context.command_path, context.get_help()
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from helps(below, context, each)


def printed(node: Node, call: list[str], width: int) -> str:
    if call[0] != "tail":
        result = mailroom(*call, dsn=node.dsn, COLUMNS=str(width))
    else:
        result = CliRunner().invoke(tail, call[1:], obj=Call(given_dsn=node.dsn), env={"COLUMNS": str(width)})
    assert "Traceback" not in result.output, (call, result.output)
    assert result.exit_code == 0 or call[1:2] == ["status"], (call, result.output)
    return result.output


def too_wide(text: str, width: int) -> list[str]:
    return [line for line in text.splitlines() if cell_len(line) > width]


@pytest.mark.slow
def test_output_fits_every_width(node: Node) -> None:
    share(tail)
    calls = fill(node)
    shown = dict.fromkeys(WIDTHS, "")
    for call in calls:
        # Sentences are wrapped the same at any width. Tables are not.
        for width in WIDTHS if is_table(call) else WIDTHS[:1]:
            text = printed(node, call, width)
            assert too_wide(text, width) == [], (width, call)
            shown[width] += text
    # Nothing was cut off.
    for text in shown.values():
        assert text.count("x") >= 6 * 300


@pytest.mark.slow
def test_help_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (tail, completion):
        share(command)
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        every = [
            *helps(root, None, "mailroom"),
            *helps(tail, None, "mailroom tail"),
            *helps(completion, None, "completion"),
        ]
        assert len(every) > 50
        assert {path: found for path, text in every if (found := too_wide(text, width))} == {}


@pytest.mark.slow
def test_an_example_is_folded_so_that_it_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = dict(helps(root, None, "mailroom"))["mailroom parked replay"].splitlines()
    at = lines.index("    mailroom parked replay shipping --matching \\")
    assert lines[at + 1 : at + 3] == ['        "connection refused" --limit 10', "        # try ten of them,"]
