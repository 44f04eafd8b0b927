"""`mailroom top` names what is in trouble, fits the screen, tells rates, and ends when it is told to."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import UUID

import psycopg
import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from dispatcher.housekeeping.janitor import sweeping_statistics
from inbox import Inbox, Park
from mailroom.cli.call import Call
from mailroom.cli.commands.top import top, watching
from mailroom.cli.options import share
from mailroom.cli.screen import screen
from mailroom.doctor import examining
from mailroom.doctor.examining import CHECKS
from mailroom.doctor.finding import FOUND, asking
from mailroom.figures.keys import KeyLook
from mailroom.figures.leaders import DispatcherStatus
from mailroom.metrics.changes import Changes
from mailroom.metrics.look import (
    BatchLook,
    ErrorLook,
    InboxLook,
    Look,
    Trouble,
    Watch,
    per_second,
)  # fmt: skip
from mailroom.sql import locks
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from mailroom.values.names import DEFAULT_SCHEMA
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, Node, failing
from tests.support.roles import rights, role
from tests.support.waiting import WITHIN_S

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
QUIET = InboxLook("quiet", 0.0, 0.0, 0, 0.0, 0, 0, False)
AGE = re.compile(r"\d\d:\d\d:\d\d|\d+ s\b")
FLUSH = "SELECT pg_stat_force_next_flush()"

share(top)

pytestmark = [
    *(pytest.mark.inbox(name) for name in ("shipping", "billing", "quiet")),
    pytest.mark.node_sql(CLOCKS_ALLOWED),
]


def a_look(inboxes: tuple[InboxLook, ...] = (), **given: Any) -> Look:
    none = Look(
        "paris", DEFAULT_SCHEMA, NOW, 12.0, 24.0, 0.5, 0.2, 3, 1, 2, 1.0, 4, (), (), inboxes, (), (), ()
    )  # fmt: skip
    return replace(none, **given)


def drawn(look: Look, width: int = 120, height: int = 40) -> list[str]:
    return [line.plain for line in screen(look, width, height, interval_s=2)]


def crowded(inboxes: int) -> Look:
    """A look with the longest names there are, and trouble in each part."""
    long, key = "s" * 41, "k" * 255
    return a_look(
        tuple(replace(QUIET, name=f"{long[:-4]}{nth:04}", parked=5, failing=7, paused=True, waiting=10**9)
              for nth in range(inboxes)),
        node="n" * 40,
        sample_age_s=50.0,
        leaders=tuple(
            DispatcherStatus(each, True, "asleep", "h" * 60, 4_194_304, 1, 9.0, {}) for each in ("dispatcher", "links")
        ),
        troubles=tuple(Trouble("M040", f"keys are parked: inbox {long}", "mailroom parked list") for _ in range(9)),
        keys=tuple(KeyLook(long, f"{key}\n\x1b[31m", "failing", 15, None, NOW + timedelta(hours=1)) for _ in range(20)),
        batches=tuple(BatchLook(long, "h" * 60, 4_194_304, 1_000, 7_000.0, False) for _ in range(20)),
        errors=tuple(ErrorLook(NOW, long, key, UUID(int=7), "E" * 60, 12, "retry") for _ in range(20)),
    )  # fmt: skip


# -- The screen -------------------------------------------------------------------------------------------------------


def test_it_fits_every_screen() -> None:
    for width, height in product((60, 80, 120), (10, 24, 50)):
        lines = drawn(crowded(100), width, height)
        assert [line for line in lines if cell_len(line) > width] == []
        assert len(lines) == height
        assert "\x1b" not in "".join(lines)
        assert lines[0].startswith("n" * 40)
        if height == 50:
            assert {"KEYS THAT WAIT", "BATCHES IN HAND", "LAST ERRORS"} <= set(lines)
            assert any(line.startswith("and ") and line.endswith("more of 100") for line in lines)


def test_quiet_node_is_short() -> None:
    lines = drawn(a_look((QUIET,)))
    assert lines[1] == "sent 12/s  delivered 24/s  reaped 0.5/s"
    assert lines[-1].split() == ["quiet", "0", "0.00", "s", "0/s", "0/s"]
    assert not [line for line in lines if line.startswith("!")]
    assert drawn(a_look())[-1] == "There is no inbox: mailroom inbox create NAME --subscribe TOPIC"
    assert drawn(a_look(sent_per_s=None))[1].startswith("sent -/s")


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = NOW, {
        "a": Changes(10, 4, 6), "reset": Changes(100, 100, 0), "rolls back": Changes(9, 0, 9), None: Changes(0, 0, 0),
    }  # fmt: skip
    after = NOW + timedelta(seconds=2), {
        "a": Changes(14, 5, 9), "reset": Changes(6, 2, 4), "rolls back": Changes(9, 100, 9), "new": Changes(8, 0, 8),
        None: Changes(1, 1, 0),
    }  # fmt: skip
    assert per_second(before, after) == {
        "a": (2, 0.5), "reset": (3, 1), "rolls back": (0, 0), "new": (4, 0), None: (0.5, 0.5)
    }  # fmt: skip
    assert per_second(None, after) == per_second(after, after) == {}


# -- The look ---------------------------------------------------------------------------------------------------------


def seen(node: Node, watch: Watch) -> Look:
    node.connection.execute(FLUSH)
    return run(node.connection, watch.looking())


@pytest.fixture
def troubled(node: Node) -> Node:
    """A parked key, a key that is paused, a paused inbox, a dead worker, a dead letter, and nobody who leads."""
    for key in ("bad", "worse"):
        node.send("shipping", {"secret": 1}, key=key)
    node.deliver_all()
    with node.connection.transaction():
        [message] = Inbox("shipping").peek(node.connection, "bad", limit=1)
        run(node.connection, failing("shipping", message, Park("secret")))
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = now() WHERE name = 'billing'")
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, paused_at) "
        "VALUES ('shipping', 'a b', 1, 0, 'infinity', now())"
    )
    node.connection.execute(
        "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, process_number) "
        "SELECT gen_random_uuid(), 'shipping', 'h' || n, n, now() - interval '1 min', 3, '{k}', '{1}', n "
        "FROM generate_series(7, 8) AS n"
    )
    node.connection.execute(
        "INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, value, sent_at) "
        "VALUES ('reap', 'secret', gen_random_uuid(), 't', 'k', 'M', 'U', '\\x00', now())"
    )
    node.connection.execute(
        "INSERT INTO mailroom.lease SELECT role, gen_random_uuid(), 1, now() + left_s * interval '1 s', 'h', 1, 1, "
        "now(), 'awake', '{}' FROM (VALUES ('executor', -100), ('links', 100)) AS l (role, left_s)"
    )
    return node


@pytest.fixture
def alive(troubled: Node, connect: Connect) -> Iterator[None]:
    """The worker of process 8 lives."""
    session = connect(autocommit=True)
    session.execute("SELECT pg_advisory_lock_shared(%s, 8)", [locks.ALIVE])
    yield
    session.execute("SELECT pg_advisory_unlock_all()")


def shown(node: Node, *arguments: str, dsn: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(
        top, ["--interval-s", "0.01", *arguments], obj=Call(given_dsn=dsn or node.dsn),
        env={"COLUMNS": None, **environment},
    )  # fmt: skip


@pytest.mark.usefixtures("alive")
def test_each_trouble_is_named_with_what_helps(troubled: Node) -> None:
    with role(troubled.dsn, *rights("auditor", "shipping", "billing", "quiet")) as (_, auditor):
        found = shown(troubled, "--once", "--json", dsn=auditor)
        assert found.exit_code == 0, found.output
        text = shown(troubled, "--once", dsn=auditor, COLUMNS="120").output
    look = json.loads(found.stdout)
    troubles = {each["what"]: each["command"] for each in look["troubles"]}
    assert {AGE.sub("AGE", what): command for what, command in troubles.items()} == {
        "a batch is of a worker that is silent: inbox shipping, worker h7 pid 7: 3 messages since AGE, "
        "its transaction has ended": "mailroom worker run MODULE:WORKER",
        "keys are parked: inbox shipping: 1 parked key, the first since AGE":
            "mailroom parked list shipping --schema mailroom",
        "there are dead letters: stage reap: 1, the last AGE ago": "mailroom dead-letter list --schema mailroom",
    }  # fmt: skip
    assert "dispatcher NOBODY LEADS" in text
    assert "dead letters 1  paused inboxes 1\n" in text
    assert re.search(r"^billing .* paused$", text, re.MULTILINE)
    assert [each["name"] for each in look["inboxes"]] == ["shipping", "billing", "quiet"]
    assert [(each["key"], each["state"]) for each in look["keys"]] == [("bad", "parked"), ("a b", "paused")]
    assert [(each["host"], each["alive"]) for each in look["batches"]] == [("h7", False), ("h8", True)]
    assert (look["processes"], look["errors"][0]["key"], look["errors"][0]["error_class"]) == (1, "bad", "Park")
    screen_text = " ".join(text.split())
    for what, command in troubles.items():
        assert AGE.split(f"! {what}")[0] in screen_text, screen_text
        assert command in screen_text, screen_text
    assert "secret" not in text + found.stdout


def test_who_is_no_auditor_is_told_what_to_grant(node: Node) -> None:
    with role(node.dsn, *rights("metrics", "shipping", "billing", "quiet")) as (_, metrics):
        found = shown(node, "--once", dsn=metrics)
    assert isinstance(found.exception, psycopg.errors.InsufficientPrivilege)


def test_rates_come_from_the_server_s_counts(node: Node) -> None:
    watch = Watch()
    first = seen(node, watch)
    assert (first.sent_per_s, first.delivered_per_s, first.reaped_per_s) == (None, None, None)
    for _ in range(6):
        node.send("shipping", key="k")
    node.deliver()  # on this connection: a session that ends flushes its counts at some later moment
    with node.connection.transaction():
        assert len(Inbox("shipping").reap(node.connection, "k")) == 6
    second = seen(node, watch)
    took_s = (second.at - first.at).total_seconds()
    shipping = next(each for each in second.inboxes if each.name == "shipping")
    for rate in (second.sent_per_s, second.delivered_per_s, second.reaped_per_s, shipping.reaped_per_s):
        assert rate == pytest.approx(6 / took_s)


def test_what_waits_and_what_fails_is_a_trouble_within_seconds(node: Node, connect: Connect) -> None:
    at = 100.0
    watch = Watch(monotonic=lambda: at)
    for name in ("shipping", "billing"):
        node.send(name, key="k")
    node.deliver()
    node.connection.execute("UPDATE mailroom.inbox SET delivered_at = now() - interval '10 s'")
    node.connection.execute("INSERT INTO mailroom.lease VALUES ('dispatcher', gen_random_uuid(), 1, "
                            "now() + interval '1 hour', 'h', 1, 1, now(), 'awake', '{}')")  # fmt: skip
    with node.connection.transaction():
        [message] = Inbox("billing").peek(node.connection, "k", limit=1)
        run(node.connection, failing("billing", message, ConnectionError("secret")))
    node.connection.execute("INSERT INTO mailroom.outbox (topic, value_json, sent_at) "
                            "VALUES ('shipping', '1', now() - interval '40 s')")  # fmt: skip
    seen(node, watch)
    at += 6
    look = seen(node, watch)
    assert [each.name for each in look.inboxes if each.is_in_trouble] == ["shipping", "billing"]
    assert [(each.id, AGE.sub("AGE", each.what)) for each in look.troubles] == [
        ("M023", ("something waits, though a process leads: something waits for the dispatcher since AGE; "
                 "h pid 1 leads, awake, backend 1")),
        *(("M027", (f"no worker reaps an inbox: inbox {each}: the oldest message was delivered AGE ago, and no worker "
                    "is there")) for each in ("billing", "shipping")),
        ("M045", ("messages fail at each try: inbox billing: 1 failing key, the first for AGE, mostly by "
                 "ConnectionError")),
    ]  # fmt: skip
    with connect(autocommit=True) as worker:  # asleep at the inbox
        worker.execute("SELECT pg_advisory_lock_shared(%s, %s)", [
            locks.ASLEEP, node.value("SELECT ('mailroom.inbox_shipping'::regclass::oid::bigint - 2147483648)::int"),
        ])  # fmt: skip
        node.connection.execute("UPDATE mailroom.inbox SET delivered_at = now() - interval '400 s'")
        at += 6
        look = seen(node, watch)
        assert [(each.name, each.unread, each.is_late) for each in look.inboxes if each.waiting] == [
            ("shipping", False, True), ("billing", True, False)
        ]  # fmt: skip
        assert [each.what for each in look.troubles if each.id == "M053"] == [
            "workers are late: inbox shipping: the oldest message was delivered 0:06:40 ago"
        ]


def test_check_that_could_not_look_is_a_trouble_and_the_others_are_told(
    troubled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = asking(Sql("SELECT 'a', (clock_ceiling / 0)::text FROM {schema}.node", columns=FOUND))
    checks = [replace(check, asking=fails) if check.id == "M040" else check for check in CHECKS]
    monkeypatch.setattr(examining, "CHECKS", checks)
    told = {each.id: each.what for each in seen(troubled, Watch()).troubles}
    assert list(told) == ["M026", "M041", "M000"]
    assert told["M000"].endswith("M040 (keys are parked): division by zero")


def test_ages_are_sampled_on_a_clock_of_their_own(node: Node) -> None:
    at = 100.0
    watch = Watch(monotonic=lambda: at)
    seen(node, watch)
    node.connection.execute("INSERT INTO mailroom.outbox (topic, value_json, sent_at) "
                            "VALUES ('shipping', '1', now() - interval '1 hour')")  # fmt: skip
    at += 4.9
    look = seen(node, watch)
    assert [look.outbox_oldest_s, look.sample_age_s] == pytest.approx([0, 4.9])
    at += 0.2
    look = seen(node, watch)
    assert [look.outbox_oldest_s, look.sample_age_s] == pytest.approx([3600, 0], abs=60)


def test_session_only_reads(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(Call(given_dsn=node.dsn)) as look:
        assert look().node == node.value("SELECT name FROM mailroom.node")
        monkeypatch.setattr(Watch, "looking", lambda self: sweeping_statistics(DEFAULT_SCHEMA))
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            look()


def test_without_a_terminal_it_says_what_to_do(node: Node) -> None:
    found = shown(node)
    assert found.exit_code == 2
    assert "Give --once, or --json" in found.output


# -- Live -------------------------------------------------------------------------------------------------------------


@contextmanager
def live(node: Node) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command on a terminal of its own."""
    code = "from mailroom.cli.commands.top import top; from mailroom.cli.options import share; share(top); top()"
    screen_fd, terminal = pty.openpty()
    environment = {**os.environ, "MAILROOM_DSN": node.dsn, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE
    ) as process:
        os.close(terminal)
        try:
            yield process, screen_fd
            rest = until(screen_fd, b"\x1b[?1049l")  # the screen that was there before comes back
            assert b"Traceback" not in rest
            assert process.wait(WITHIN_S) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()
            os.close(screen_fd)


@pytest.mark.slow
def test_live_screen_ends_by_a_key_and_by_an_interrupt(node: Node) -> None:
    with live(node) as (_, by_key), live(node) as (process, by_signal):
        until(by_key, b"quiet")
        os.write(by_key, b"q")
        until(by_signal, b"quiet")
        process.send_signal(signal.SIGINT)


def until(screen_fd: int, wanted: bytes) -> bytes:
    """Read what is drawn until it has this text."""
    read, ends_at = b"", time.monotonic() + WITHIN_S
    while wanted not in read:
        ready, _, _ = select.select([screen_fd], [], [], max(ends_at - time.monotonic(), 0))
        assert ready, read
        read += os.read(screen_fd, 65_536)
    return read
