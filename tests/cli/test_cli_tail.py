"""`mailroom tail` shows what comes, takes nothing, and `mailroom completion` completes in a real shell."""

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result

from inbox.cli.tail import PAGE, SESSION, following, tail
from inbox.cli.tail_log import TICKS
from mailroom.cli.call import Call
from mailroom.cli.commands.completion import VARIABLE, completion
from mailroom.cli.options import share
from mailroom.cli.root import ABOUT, root
from mailroom.errors import UnknownInbox
from mailroom.logs.segments import making_segment
from mailroom.session import settings
from mailroom.sql import locks
from mailroom.sql.runner import run
from tests.logs.support import make
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually

share(tail)


def tailed(node: Node, *arguments: str, **environment: str) -> Result:
    result = CliRunner().invoke(
        tail, arguments, obj=Call(given_dsn=node.dsn), env={"COLUMNS": None, **environment}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result


def lines(node: Node, *arguments: str) -> list[Any]:
    return [json.loads(line) for line in tailed(node, *arguments, "--json").stdout.splitlines()]


@pytest.mark.parametrize("order", ["key", "total"])
def test_it_shows_what_came_and_takes_nothing(node: Node, order: str) -> None:
    node.inbox("shipping", "order.paid", order=order)
    ids = [node.send("order.paid", {"secret": nth}, key=f"k{nth}", headers={"user": "grace"}) for nth in range(3)]
    node.deliver_all()
    found = lines(node, "shipping", "--since", "3600", "--limit", "2")
    assert [each["id"] for each in found] == [str(id) for id in ids[:2]]
    assert found[0].keys() == {"delivered_at", "topic", "key", "id", "clock", "age_s", "size"}
    assert (found[0]["topic"], found[0]["key"], found[0]["size"]) == ("order.paid", "k0", 9)
    assert 0 <= found[0]["age_s"] < 3600
    text = tailed(node, "shipping", "--since", "3600", "--limit", "3").stdout
    assert [line.split()[2:6] for line in text.splitlines()] == [
        ["order.paid", "key", f"k{nth}", str(id)] for nth, id in enumerate(ids)
    ]
    assert "secret" not in text
    assert "grace" not in text
    assert len(node.delivered()) == 3


def test_values_are_shown_on_demand(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    node.send("order.paid", {"article": 7}, key="k", headers={"user": "ada"})
    node.deliver_all()
    [found] = lines(node, "shipping", "--since", "3600", "--limit", "1", "--values")
    assert (found["value"], found["headers"], found["size"]) == ({"article": 7}, {"user": "ada"}, 10)
    text = tailed(node, "shipping", "--since", "3600", "--limit", "1", "--values").stdout
    assert text.splitlines()[1:] == ["    user: ada", '    {"article": 7}']


def test_it_begins_with_what_comes_from_now_on_or_came_lately(node: Node, connect: Connect) -> None:
    node.inbox("shipping", "order.paid")
    for key in ("old", "young"):
        node.send("order.paid", key=key)
    node.deliver_all()
    node.connection.execute(
        "UPDATE mailroom.inbox_shipping SET delivered_at = delivered_at - interval '1 h' WHERE key = 'old'"
    )
    [found] = lines(node, "shipping", "--since", "600", "--limit", "1")
    assert found["key"] == "young"
    connection = connect(autocommit=True)
    seen = following(connection, "mailroom", "shipping", poll_interval_s=0.01)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, seen)
        eventually(lambda: looks(node, connection))
        node.send("order.paid", key="new")
        node.deliver_all()
        assert first.result(WITHIN_S)[0].key == "new"


def looks(node: Node, connection: psycopg.Connection) -> bool:
    """Return whether the session has looked for what is new, and waits."""
    return bool(
        node.value(
            "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state = 'idle' AND query ~ 'age|LIMIT'",
            connection.info.backend_pid,
        )
    )


def test_a_delivery_wakes_it_while_a_worker_sleeps(node: Node, connect: Connect) -> None:
    node.inbox("shipping", "order.paid")
    sleeper, connection = connect(autocommit=True), connect(autocommit=True)
    table = "'mailroom.inbox_shipping'::regclass"
    sleeper.execute(f"SELECT pg_advisory_lock_shared({locks.ASLEEP}, {locks.key(table)})")
    seen = following(connection, "mailroom", "shipping", poll_interval_s=3_600)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, seen)
        eventually(lambda: looks(node, connection))
        node.send("order.paid", key="new")
        node.deliver_all()
        assert first.result(WITHIN_S)[0].key == "new"


def test_it_reads_page_by_page_in_a_session_that_cannot_write(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    with node.connection.transaction():
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, key, value) SELECT 'order.paid', 'k' || n, '\\xf6' "
            "FROM generate_series(1, %s) AS n",
            [PAGE + 5],
        )
    node.deliver_all()
    with settings.connect(node.dsn, "tail", SESSION, autocommit=True) as connection:
        found = list(islice(following(connection, "mailroom", "shipping", since_s=3600), PAGE + 5))
        assert len({seen.id for seen, _ in found}) == PAGE + 5
        # Nothing stays open between two looks: no transaction, and no snapshot.
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        assert not node.rows(
            "SELECT FROM pg_stat_activity WHERE pid = %s AND backend_xmin IS NOT NULL", connection.info.backend_pid
        )
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("DELETE FROM mailroom.inbox_shipping")


def test_of_a_log_it_shows_what_goes_past_of_the_topics_that_the_inbox_wants(node: Node, connect: Connect) -> None:
    """Through segments, more of them than one look has, and not what was diverted, which had gone past before."""
    make(node, "billing", lanes=4)
    make(node, "refunds", lanes=4, topics=["order.refunded"])
    for nth in range(TICKS + 5):
        node.send("order.refunded" if nth % 50 == 0 else "order.paid", nth, key=f"k{nth}")
    node.allow_clocks()
    for nth in range(TICKS + 5):
        node.deliver(rows=1)
        if nth % 60 == 0:
            with node.connection.transaction():
                run(node.connection, making_segment("mailroom", "orders"))
    node.connection.execute(
        "UPDATE mailroom.log_tick SET at = at - interval '1 h' "
        "WHERE clock <= (SELECT clock FROM mailroom.log_tick ORDER BY clock OFFSET 1 LIMIT 1)"
    )
    every = lines(node, "billing", "--since", "600", "--limit", str(TICKS + 3))
    assert [each["key"] for each in every] == [f"k{nth}" for nth in range(2, TICKS + 5)]
    assert every[0].keys() == {"delivered_at", "topic", "key", "id", "clock", "age_s", "size"}
    wanted = lines(node, "refunds", "--since", "9999", "--limit", "3", "--values")
    assert [each["value"] for each in wanted] == [0, 50, 100]
    sleeper, connection = connect(autocommit=True), connect(autocommit=True)
    table = "'mailroom.log_orders'::regclass"
    sleeper.execute(f"SELECT pg_advisory_lock_shared({locks.ASLEEP}, {locks.key(table)})")
    seen = following(connection, "mailroom", "refunds", poll_interval_s=3_600)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, seen)
        eventually(lambda: looks(node, connection))
        # An unwanted one wakes it too, and it goes on past that.
        for topic, key in (("order.paid", "other"), ("order.refunded", "new")):
            node.send(topic, key=key)
        node.deliver_all()
        assert first.result(WITHIN_S)[0].key == "new"


def test_of_a_log_it_reads_page_by_page(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=4)
    with node.connection.transaction():
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, key, value) SELECT 'order.paid', 'k' || n, '\\xf6' "
            "FROM generate_series(1, %s) AS n",
            [2 * PAGE + 5],
        )
    node.deliver_all()
    connection = connect(autocommit=True)
    found = list(islice(following(connection, "mailroom", "billing", since_s=3600), 2 * PAGE + 5))
    clocks = [seen.clock for seen, _ in found]
    assert clocks == sorted(set(clocks))


def test_inbox_that_is_not_there_is_told(node: Node) -> None:
    with pytest.raises(UnknownInbox):
        tailed(node, "nowhere")


def test_ctrl_c_ends_it_quietly(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.inbox("shipping")

    def pressed(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("inbox.cli.tail.following", pressed)
    assert tailed(node, "shipping").output == ""


# -- Completion -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the command `mailroom`, and the script for bash beside it."""
    directory = tmp_path_factory.mktemp("bin")
    command = directory / "mailroom"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mailroom "$@"\n')
    command.chmod(0o755)
    script = CliRunner().invoke(completion, ["bash"])
    assert script.exit_code == 0
    (directory / "completion.bash").write_text(script.stdout)
    return directory


def test_commands_options_and_choices_are_completed() -> None:
    for (*before, begun), found in (
        (["inbox", "cr"], ["create"]),
        (["status", "--log"], ["--log-format"]),
        (["status", "--log-format", "j"], ["json"]),
        (["--sch"], ["--schema"]),
        (["nowhere", "x"], []),
    ):
        made = BashComplete(root, {}, "mailroom", VARIABLE).get_completions(before, begun)
        assert [each.value for each in made] == found


@pytest.mark.slow
def test_bash_completes(shell: Path) -> None:
    words = ["mailroom", "inb"]
    program = (
        f'PATH={shlex.quote(str(shell))}:"$PATH"; source {shlex.quote(str(shell / "completion.bash"))}; '
        "complete -p mailroom >&2; "
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_mailroom_completion mailroom; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=WITHIN_S, check=True)
    assert result.stdout.split() == ["inbox"]
    assert "_mailroom_completion" in result.stderr


def test_completing_a_command_imports_none() -> None:
    program = (
        "import sys; from mailroom.cli.root import root; import click; "
        "names = [each.value for each in root.shell_complete(click.Context(root), '')]; "
        "print(len(names), {'inbox', 'outbox', 'dispatcher', 'alembic', 'sqlalchemy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    number, modules = result.stdout.split(maxsplit=1)
    assert int(number) >= len(ABOUT) - 3  # some belong to other distributions
    assert modules.strip() == "set()"


def test_other_shells_get_their_script() -> None:
    assert isinstance(completion, click.Command)
    for name in ("zsh", "fish"):
        assert "_MAILROOM_COMPLETE" in CliRunner().invoke(completion, [name]).stdout
