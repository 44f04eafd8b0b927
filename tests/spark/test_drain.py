"""An inbox is drained into Parquet exactly once, whatever dies, breaks or runs beside it."""

import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import UUID

import psycopg
import pytest
from click.testing import CliRunner
from pyarrow import dataset, fs, parquet

from inbox import Inbox, Message
from inbox.by_key.claim import reaping_rows
from mailroom.cli.failures import Interrupted
from mailroom.errors import ConfigurationError, ConnectionFailed, InvalidMessage, MailroomError, UnknownInbox
from mailroom.session.commit import CommitAttempt
from mailroom.sql.operation import Operation
from mailroom.values import codec
from spark_jobs.archive import drainer as module
from spark_jobs.archive.drainer import Drainer, TakenSegment
from spark_jobs.archive.files import SegmentFile, Series
from spark_jobs.archive.folder import Folder, folder, full_name, shown, spark_name
from spark_jobs.drain import Drained, command, drain, drain_on, drained
from spark_jobs.node import Node as SparkNode
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import WITHIN_S, eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INBOX = "shipping"
MESSAGES = 250
SMALL = 100  # messages of a segment: three of them
SPAWN = multiprocessing.get_context("spawn")


pytestmark = pytest.mark.inbox(INBOX)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "drained" / INBOX)


def fill(node: Node, messages: int = MESSAGES, keys: int = 10) -> Counter[tuple[str, bytes]]:
    """Send and deliver messages, and return their ids with their bytes."""
    sent: Counter[tuple[str, bytes]] = Counter()
    with node.connection.transaction():
        for nth in range(messages):
            value = {"nth": nth, "note": "x" * (nth % 7)}
            sent[(str(_send(node, value, f"key-{nth % keys}")), codec.encode(value))] += 1
    node.deliver_all()
    return sent


def _send(node: Node, value: object, key: str) -> Any:
    from tests.support.node import send

    return send(node.connection, INBOX, value, key=key)


def visible(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name[0] not in "_.")


def hidden(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name[0] in "_.")


def rows(directory: str) -> list[dict[str, Any]]:
    """Return what readers see."""
    found: list[dict[str, Any]] = []
    for name in visible(directory):
        found += parquet.read_table(f"{directory}/{name}").to_pylist()
    return found


def check(node: Node, sent: Counter[tuple[str, bytes]], *directories: str) -> None:
    """See that each message is in one file or in the inbox, once, and that a key's clocks rise along a shard."""
    there = [row for directory in directories for row in rows(directory)]
    waiting = node.rows("SELECT message_id::text, value FROM mailroom.inbox WHERE inbox = %s", INBOX)
    assert Counter((row["message_id"], row["value"]) for row in there) + Counter(waiting) == sent
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for row in there:
        key = (row["key"], row["shard"])
        assert last.get(key, (0, 0)) < (row["segment"], row["clock"])
        assert last.get(key, (0, 0))[1] < row["clock"]
        last[key] = (row["segment"], row["clock"])
    segments = node.rows("SELECT shard, segment, messages FROM mailroom.spark_drain ORDER BY shard")
    for shard, _, messages in segments:
        assert sum(row["shard"] == shard for row in there) in {messages, messages - _unfinished(node, shard)}


def _unfinished(node: Node, shard: int) -> int:
    """Return how many messages are in a file that has been committed and not shown yet."""
    [(finished, directory, file)] = node.rows(
        "SELECT finished, directory, file FROM mailroom.spark_drain WHERE shard = %s", shard
    )
    path = Path(directory, str(file))
    return 0 if finished or not path.exists() else parquet.read_metadata(path).num_rows


# --- dying ------------------------------------------------------------------------------------------------------------


def _die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(*arguments: Any) -> None:
        original(*arguments)
        _die()

    return patched


def _dying_once_written(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Drainer, connection: psycopg.Connection) -> Any:
        return _die() if self._written is not None else original(self, connection)

    return patched


STEPS: dict[str, Callable[[], Any]] = {
    "before the file is complete": lambda: mock.patch.object(SegmentFile, "seal", _die),
    "after the file is durable": lambda: mock.patch.object(Folder, "seal", _dying_after(Folder.seal)),
    "before COMMIT": lambda: mock.patch.object(CommitAttempt, "ending", _die),
    "after COMMIT": lambda: mock.patch.object(Drainer, "finish", _dying_once_written(Drainer.finish)),
    "after the file has its name": lambda: mock.patch.object(Folder, "rename", _dying_after(Folder.rename)),
}


def drain_and_die(dsn: str, directory: str, step: str) -> None:
    with STEPS[step]():
        drain(SparkNode(dsn=dsn), INBOX, directory, max_messages=SMALL)


def killed(dsn: str, directory: str, step: str) -> None:
    process = SPAWN.Process(target=drain_and_die, args=(dsn, directory, step))
    process.start()
    process.join(WITHIN_S)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("step", list(STEPS))
def test_killed_at_any_step_it_goes_on_from_there(node: Node, directory: str, step: str) -> None:
    sent = fill(node)
    killed(node.dsn, directory, step)
    eventually(lambda: node.sessions("mailroom spark drain") == [])
    check_committed(
        node,
        sent,
        directory,
        MESSAGES - SMALL * step.startswith("after the file has") - SMALL * (step == "after COMMIT"),
    )
    left = drain(SparkNode(dsn=node.dsn), INBOX, directory, max_messages=SMALL)
    assert left.messages == MESSAGES - SMALL * (step in ("after COMMIT", "after the file has its name"))
    check(node, sent, directory)
    assert len(rows(directory)) == MESSAGES
    assert hidden(directory) == []


def check_committed(node: Node, sent: Counter[tuple[str, bytes]], directory: str, waiting: int) -> None:
    """See that nothing is visible that is still in the inbox, and that this many messages are."""
    still = {row[0] for row in node.rows("SELECT message_id::text FROM mailroom.inbox")}
    assert len(still) == waiting
    shown = {row["message_id"] for row in rows(directory)}
    assert not shown & still
    assert shown | still <= {message_id for message_id, _ in sent}


def test_lost_connection_rolls_back_and_the_drain_goes_on(node: Node, directory: str) -> None:
    sent = fill(node)
    seal, todo = SegmentFile.seal, [True]

    def severing(self: SegmentFile) -> None:
        seal(self)
        if todo and todo.pop():
            node.end_sessions("mailroom spark drain")

    with mock.patch.object(SegmentFile, "seal", severing):
        assert drain(SparkNode(dsn=node.dsn), INBOX, directory, max_messages=SMALL) == Drained(MESSAGES, 3)
    check(node, sent, directory)
    assert (len(rows(directory)), hidden(directory)) == (MESSAGES, [])


# The COMMITs of a drain: of others' segments that it finishes, of its own one before, of a segment, of its file's name.
@pytest.mark.sample(4)
@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("fault", [CommitFault.CUT, CommitFault.SWALLOW, CommitFault.HOLD])
def test_lost_answer_to_commit_is_looked_up(node: Node, directory: str, fault: CommitFault, nth: int) -> None:
    sent = fill(node)
    with proxied(node.dsn) as (proxy, dsn):
        faults = iter([*[CommitFault.NONE] * nth, fault])
        proxy.at_commits(lambda: next(faults, CommitFault.NONE), held_s=0.02)
        assert drain(SparkNode(dsn=dsn), INBOX, directory, max_messages=SMALL) == Drained(MESSAGES, 3)
        assert proxy.commits[nth] is fault
    check(node, sent, directory)
    assert (len(rows(directory)), hidden(directory)) == (MESSAGES, [])


def test_error_while_writing_reaps_nothing_and_leaves_no_file(node: Node, directory: str) -> None:
    sent = fill(node)

    class Full:
        closed = False

        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.closed = True

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    with mock.patch.object(Folder, "create", return_value=Full()), pytest.raises(OSError, match="No space left"):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert os.listdir(directory) == []
    check(node, sent, directory)
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory).messages == MESSAGES


def waiting_drains(node: Node) -> list[int]:
    return node.sessions("mailroom spark drain", "wait_event_type = 'Lock'")


def test_file_of_a_failed_attempt_is_deleted_at_once(node: Node, directory: str) -> None:
    fill(node)
    with (
        mock.patch("spark_jobs.archive.files._table", side_effect=OSError("broken")),
        pytest.raises(OSError, match="broken"),
    ):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert os.listdir(directory) == []


def test_server_that_is_away_when_it_is_asked_is_asked_again(node: Node, directory: str) -> None:
    sent = fill(node)
    connect, calls = SparkNode.connect, itertools.count(1)

    def away_at_second(self: SparkNode, role: str) -> psycopg.Connection:
        if next(calls) == 2:
            raise ConnectionFailed("not now")
        return connect(self, role)

    with proxied(node.dsn) as (proxy, dsn), mock.patch.object(SparkNode, "connect", away_at_second):
        proxy.at_next_commits(CommitFault.SWALLOW)
        assert drain(SparkNode(dsn=dsn), INBOX, directory, max_messages=SMALL) == Drained(MESSAGES, 3)
    check(node, sent, directory)


# --- side by side -----------------------------------------------------------------------------------------------------


@contextmanager
def held_at_seal(work: Callable[[], Drained]) -> Iterator["Future[Drained]"]:
    """Run a drain in a thread, and the test while it stands before the end of its first file."""
    standing, go_on = threading.Event(), threading.Event()
    seal = SegmentFile.seal

    def waiting(self: SegmentFile) -> None:
        if not standing.is_set():
            standing.set()
            assert go_on.wait(WITHIN_S)
        seal(self)

    with mock.patch.object(SegmentFile, "seal", waiting), ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        try:
            assert standing.wait(WITHIN_S)
            yield future
        finally:
            go_on.set()
            future.result(WITHIN_S)


def test_two_drains_of_one_shard_take_turns(node: Node, directory: str) -> None:
    sent = fill(node)

    def work() -> Drained:
        return drain(SparkNode(dsn=node.dsn), INBOX, directory, max_messages=SMALL)

    with ThreadPoolExecutor(1) as other:
        with held_at_seal(work) as first:
            second = other.submit(work)
            eventually(lambda: waiting_drains(node))
            assert visible(directory) == []
        assert first.result().messages + second.result(WITHIN_S).messages == MESSAGES
    check(node, sent, directory)
    assert (len(rows(directory)), hidden(directory)) == (MESSAGES, [])


def test_segment_that_another_drain_has_not_finished_is_finished_first(
    node: Node, directory: str, connect: Connect
) -> None:
    sent = fill(node)
    shard, other = (Drainer("mailroom", INBOX, directory, 0, SMALL) for _ in range(2))
    with connect() as connection:
        other.segment(connection)
        connection.commit()
        assert shard.segment(connection) == TakenSegment(0, is_all=False)
        shard.finish(connection)
        connection.commit()
        assert shard.segment(connection) == TakenSegment(SMALL, is_all=False)
        connection.commit()
        shard.finish(connection)
    assert len(visible(directory)) == 2
    check(node, sent, directory)


def leave_hidden(node: Node, directory: str, *shards: int) -> None:
    """Drain a segment by each of the shards, as if they had died before their files got their names."""
    with psycopg.connect(node.dsn) as connection:
        for shard in shards:
            Drainer("mailroom", INBOX, directory, shard, 20).segment(connection)


def test_finished_file_stays_so_when_the_next_segment_fails(node: Node, directory: str) -> None:
    fill(node)
    leave_hidden(node, directory, 0)
    with (
        mock.patch("spark_jobs.archive.files._table", side_effect=OSError("broken")),
        pytest.raises(OSError, match="broken"),
    ):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert len(visible(directory)) == 1
    assert node.rows("SELECT segment, finished FROM mailroom.spark_drain") == [(1, True)]


def test_other_shards_are_finished_too(node: Node, directory: str, connect: Connect, tmp_path: Path) -> None:
    sent = fill(node)
    elsewhere = str(tmp_path / "elsewhere")
    leave_hidden(node, elsewhere, 1)
    leave_hidden(node, directory, 2, 3)
    assert visible(directory) == visible(elsewhere) == []
    with connect() as living:
        living.execute("SELECT FROM mailroom.spark_drain WHERE shard = 3 FOR UPDATE")
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
        assert node.rows("SELECT shard FROM mailroom.spark_drain WHERE NOT finished") == [(3,)]
    assert len(hidden(directory)) == 1
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    check(node, sent, directory, elsewhere)
    assert len(rows(directory) + rows(elsewhere)) == MESSAGES


def test_shard_of_another_machine_is_warned_of(
    node: Node, directory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(node)
    leave_hidden(node, str(tmp_path / "a"), 1)
    leave_hidden(node, directory, 2)
    (tmp_path / "a").rename(tmp_path / "b")
    with caplog.at_level(logging.WARNING, "mailroom.spark"):
        assert drain(SparkNode(dsn=node.dsn), INBOX, directory).messages == MESSAGES - 40
    [told] = caplog.messages
    assert told.startswith(f"drain {INBOX}: shard 1 stays unfinished: A file with messages that have left the inbox is")
    assert len(rows(directory)) == MESSAGES - 20
    with pytest.raises(MailroomError, match="A file with messages that have left the inbox is missing"):
        drain(SparkNode(dsn=node.dsn), INBOX, directory, shard=1)
    (tmp_path / "b").rename(tmp_path / "a")
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert len(rows(str(tmp_path / "a"))) == 20


def test_shards_share_the_inbox(node: Node, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_KEYS", 2)
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    sent = fill(node)

    def work(shard: int, messages: int) -> Drained:
        return drain(SparkNode(dsn=node.dsn), INBOX, directory, shard=shard, max_messages=messages)

    with held_at_seal(lambda: work(0, 20)):
        assert work(1, SMALL).messages == MESSAGES - 2 * MESSAGES // 10
        assert {row["shard"] for row in rows(directory)} == {1}
    check(node, sent, directory)
    assert {row["shard"] for row in rows(directory)} == {0, 1}
    assert len(rows(directory)) == MESSAGES


def test_keys_that_others_work_on_are_left_to_them(node: Node, directory: str, connect: Connect) -> None:
    sent = fill(node)
    with connect() as worker:
        taken = Inbox(INBOX).reap_any(worker, max_keys=3, per_key=5)
        assert drain(SparkNode(dsn=node.dsn), INBOX, directory).messages == MESSAGES - 3 * MESSAGES // 10
        worker.commit()
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert len(rows(directory)) == MESSAGES - len(taken)
    check(node, sent - Counter((str(message.id), message.raw) for message in taken), directory)


def test_keys_in_trouble_are_left_alone(node: Node, directory: str) -> None:
    sent = fill(node)
    node.rows(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at) VALUES "
        "('shipping', 'key-1', 0, 3, 'infinity', now()), ('shipping', 'key-2', 0, 1, now() + interval '1 hour', NULL) "
        "RETURNING 1"
    )
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory).messages == MESSAGES * 8 // 10
    assert node.rows("SELECT DISTINCT key FROM mailroom.inbox ORDER BY key") == [("key-1",), ("key-2",)]
    check(node, sent, directory)


# --- what is in a file ------------------------------------------------------------------------------------------------


def test_rows_are_the_messages(node: Node, directory: str) -> None:
    node.send(INBOX, {"a": [1, None]}, key="k\u00e9y", headers={"trace": "1", "caf\u00e9": ""}, event_type="C")
    node.send(INBOX, None, expires_at=datetime.fromisoformat("9990-01-02T03:04:05.678901+00:00"))
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, key, value_json, kind) VALUES ('shipping', 'j', '{\"n\": 1.50}', 'R'), "
        "('shipping', 'j', 'null', 'M')"
    )
    node.deliver_all()
    with node.connection.transaction():
        messages = Inbox(INBOX).peek(node.connection)
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory, shard=7) == Drained(4, 1)
    assert [_columns(message) for message in messages] == [_known(row) for row in rows(directory)]
    [name] = visible(directory)
    about = parquet.read_schema(f"{directory}/{name}").metadata
    node_id = node.value("SELECT id::text FROM mailroom.node")
    assert name == f"shipping-{node_id[:8]}-007-000000000001.parquet"
    [(file,)] = node.rows("SELECT file FROM mailroom.spark_drain")
    assert file.startswith(f".shipping-{node_id[:8]}-007-000000000001-")
    assert {name: about[name.encode()].decode() for name in ATTRIBUTES} == {
        "mailroom.inbox": "shipping",
        "mailroom.shard": "7",
        "mailroom.segment": "1",
        "mailroom.node": node_id,
        "mailroom.attempt": file[-37:-5],
    }
    assert {(row["inbox"], row["shard"], row["segment"]) for row in rows(directory)} == {("shipping", 7, 1)}


ATTRIBUTES = ("mailroom.inbox", "mailroom.shard", "mailroom.segment", "mailroom.node", "mailroom.attempt")


def _columns(message: Message) -> dict[str, Any]:
    names = ("key", "clock", "sent_clock", "topic", "kind", "message_type", "event_type", "source", "sent_at")
    is_json = message._json is not None
    return {name: getattr(message, name) for name in (*names, "expires_at", "delivered_at")} | {
        "origin": str(message.origin),
        "message_id": str(message.id),
        "value": None if is_json else message.raw,
        "value_json": message.raw.decode() if is_json else None,
        "headers": dict(message.headers),
    }


def _known(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("sent_at", "expires_at", "delivered_at"):
        assert row[name] is None or row[name].utcoffset() == timedelta(0)
    known = {name: cell for name, cell in row.items() if name not in ("inbox", "segment", "shard")}
    return known | {"headers": dict(row["headers"] or ())}


def test_segments_are_as_large_as_was_asked_for(node: Node, directory: str) -> None:
    fill(node)
    drain(SparkNode(dsn=node.dsn), INBOX, directory, max_messages=SMALL)
    sizes = [parquet.read_metadata(f"{directory}/{name}").num_rows for name in visible(directory)]
    assert sizes == [SMALL, SMALL, MESSAGES - 2 * SMALL]


def test_large_segment_ends_at_its_bytes(node: Node, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(module, "CLAIM", 10)
    sent = fill(node, 30, keys=1)
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory) == Drained(30, 3)
    check(node, sent, directory)


def fill_large(node: Node, messages: int) -> int:
    """Send and deliver messages of a MiB, and return the bytes of a value."""
    with node.connection.transaction():
        for nth in range(messages):
            _send(node, os.urandom(2**20), f"key-{nth}")
    node.deliver_all()
    return int(node.value("SELECT max(octet_length(value)) FROM mailroom.inbox"))


def test_large_values_make_small_groups_and_segments(
    node: Node, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM", 1)
    monkeypatch.setattr("spark_jobs.archive.files.GROUP_BYTES", 2 * 2**20)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 5 * 2**20)
    fill_large(node, 7)
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory) == Drained(7, 2)
    files = [parquet.read_metadata(f"{directory}/{name}") for name in visible(directory)]
    groups = [[file.row_group(nth).num_rows for nth in range(file.num_row_groups)] for file in files]
    assert groups == [[2, 2, 1], [2]]


def test_rows_that_wait_for_the_writer_are_few(node: Node, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM", 1)
    monkeypatch.setattr("spark_jobs.archive.files.GROUP_BYTES", 2 * 2**20)
    size = fill_large(node, 12)
    written: list[int] = []
    ahead: list[int] = []
    write, add = SegmentFile._write, SegmentFile.add

    class Slow:
        """Writes a group no sooner than somebody waits for it."""

        def submit(self, _: object, group: list[Any]) -> Any:
            def result() -> None:
                write(ahead_of[0], group)
                written.append(len(group))

            return mock.Mock(result=result)

        def shutdown(self, **_: object) -> None:
            pass

    ahead_of: list[SegmentFile] = []

    def adding(self: SegmentFile, taken: list[Any]) -> int:
        ahead_of[:] = [self]
        self._thread = Slow()  # type: ignore[assignment]
        found = add(self, taken)
        ahead.append(self.messages - sum(written))
        return found

    monkeypatch.setattr(SegmentFile, "add", adding)
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory) == Drained(12, 1)
    assert sum(written) == 12
    assert max(ahead) * size < (2 + 1) * 2 * size


def test_claims_that_large_values_cut_short_do_not_take_more_keys(
    node: Node, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2 * 2**20)
    fill_large(node, 3)
    shard = Drainer("mailroom", INBOX, directory, 0, SMALL)
    with psycopg.connect(node.dsn) as connection:
        assert shard.segment(connection).messages == 3
    assert shard._keys == module.FEWEST_KEYS


def test_many_keys_fill_a_claim_all_the_same(node: Node, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_KEYS", 1)
    fill(node, MESSAGES, keys=MESSAGES)
    claims = []
    original = reaping_rows

    def counting(*arguments: Any) -> Operation[Any]:
        claims.append(arguments)
        return (yield from original(*arguments))

    monkeypatch.setattr(module, "reaping_rows", counting)
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory) == Drained(MESSAGES, 1)
    assert len(claims) <= 6  # of 1, 4, 16, 64, 256 keys


def test_empty_inbox_makes_no_file(node: Node, directory: str) -> None:
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory) == Drained(0, 0)
    assert os.listdir(directory) == []
    assert node.rows("SELECT segment, finished FROM mailroom.spark_drain") == [(0, True)]


def test_segments_are_durable_whatever_the_server_is_set_to(node: Node, directory: str, connect: Connect) -> None:
    fill(node)
    with connect() as connection:
        connection.execute("SET synchronous_commit = off")
        Drainer("mailroom", INBOX, directory, 0, SMALL).segment(connection)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


# --- directories ------------------------------------------------------------------------------------------------------


def test_other_directory_finishes_the_file_of_the_one_before(node: Node, directory: str, tmp_path: Path) -> None:
    sent = fill(node)
    killed(node.dsn, directory, "after COMMIT")
    assert visible(directory) == []
    other = str(tmp_path / "other")
    assert drain(SparkNode(dsn=node.dsn), INBOX, other).messages == MESSAGES - SMALL
    assert len(rows(directory)) == SMALL
    check(node, sent, directory, other)


def test_missing_file_is_told_and_nothing_more_is_drained(node: Node, directory: str) -> None:
    fill(node)
    killed(node.dsn, directory, "after COMMIT")
    [name] = hidden(directory)
    os.unlink(f"{directory}/{name}")
    for _ in range(2):
        with pytest.raises(MailroomError, match=f"messages that have left the inbox is missing: .* has neither {name}"):
            drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert os.listdir(directory) == []
    assert node.value("SELECT count(*) FROM mailroom.inbox") == MESSAGES - SMALL


def test_file_that_was_deleted_while_it_was_written_loses_nothing(node: Node, directory: str) -> None:
    sent = fill(node)
    seal = Folder.seal

    def sealing(self: Folder, name: str, file: Any) -> None:
        seal(self, name, file)
        os.unlink(f"{directory}/{name}")

    with (
        mock.patch.object(Folder, "seal", sealing),
        pytest.raises(MailroomError, match=r"\.part was deleted from .*; its messages stay in the inbox"),
    ):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert node.value("SELECT count(*) FROM mailroom.inbox") == MESSAGES
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory).messages == MESSAGES
    check(node, sent, directory)


def final_of(directory: str, hidden: str) -> Path:
    return Path(directory, f"{hidden[1:].rpartition('-')[0]}.parquet")


def test_final_name_that_a_store_copied_is_taken_as_it_is(node: Node, directory: str) -> None:
    sent = fill(node)
    leave_hidden(node, directory, 0)
    [name] = hidden(directory)
    final = final_of(directory, name)
    final.write_bytes(Path(directory, name).read_bytes())
    before = final.stat().st_ino
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert (final.stat().st_ino, hidden(directory)) == (before, [])
    check(node, sent, directory)


def test_name_is_durable_before_the_segment_counts_as_finished(node: Node, directory: str) -> None:
    fill(node)
    leave_hidden(node, directory, 0)
    [name] = hidden(directory)
    os.rename(f"{directory}/{name}", final_of(directory, name))
    synced: list[Path] = []
    with mock.patch("spark_jobs.archive.folder._sync", synced.append), psycopg.connect(node.dsn) as connection:
        Drainer("mailroom", INBOX, directory, 0, SMALL).finish(connection)
    assert synced == [Path(directory)]


@pytest.mark.parametrize("content", ["another attempt", "no file of a drain", "no Parquet"])
def test_file_of_another_history_is_not_taken_for_the_committed_one(
    node: Node, directory: str, tmp_path: Path, content: str
) -> None:
    fill(node)
    leave_hidden(node, directory, 0)
    [name] = hidden(directory)
    final = final_of(directory, name)
    table = parquet.read_table(f"{directory}/{name}")
    if content == "another attempt":
        table = table.replace_schema_metadata({"mailroom.attempt": UUID(int=0).hex})
    elif content == "no file of a drain":
        table = table.replace_schema_metadata(None)
    parquet.write_table(table, final)
    if content == "no Parquet":
        final.write_bytes(b"")
    before = final.read_bytes()
    with pytest.raises(MailroomError, match=r"is not the one which this database has committed as \.shipping-"):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert (final.read_bytes(), hidden(directory)) == (before, [name])
    final.rename(tmp_path / "moved.parquet")
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert len(rows(directory)) == MESSAGES


def test_files_may_be_moved_once_they_are_visible(node: Node, directory: str) -> None:
    fill(node)
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    for name in visible(directory):
        os.unlink(f"{directory}/{name}")
    sent = fill(node)
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert Counter((row["message_id"], row["value"]) for row in rows(directory)) == sent


def test_no_file_is_written_over(node: Node, directory: str) -> None:
    fill(node)
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    before = rows(directory)
    node.connection.execute("UPDATE mailroom.spark_drain SET segment = 0")
    sent = fill(node)
    with pytest.raises(MailroomError, match=r"-000000000001.parquet is in .* already"):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert rows(directory) == before
    assert node.value("SELECT count(*) FROM mailroom.inbox") == sent.total()


@pytest.mark.parametrize("others", ["a visible file", "a hidden file of a later segment"])
def test_hidden_files_of_another_history_are_left_alone(node: Node, directory: str, others: str) -> None:
    sent = fill(node)
    os.makedirs(directory)
    series = Series(node.value("SELECT id FROM mailroom.node"), INBOX, 0)
    names = [series.hidden(1), series.final(1) if others == "a visible file" else series.hidden(2)]
    for name in names:
        Path(directory, name).touch()
    with pytest.raises(MailroomError, match="or is a copy of the one that drained it"):
        drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert sorted(os.listdir(directory)) == sorted(names)
    assert node.value("SELECT count(*) FROM mailroom.inbox") == sent.total()


def test_files_of_others_are_left_alone(node: Node, directory: str) -> None:
    fill(node)
    os.makedirs(directory)
    prefix = f".shipping-{node.value('SELECT left(id::text, 8) FROM mailroom.node')}-000-"
    for name in (f"{prefix}000000000001-old.part", ".shipping-00000000-000-000000000001-x.part", "_SUCCESS"):
        Path(directory, name).touch()
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    assert hidden(directory) == [".shipping-00000000-000-000000000001-x.part", "_SUCCESS"]


def test_hidden_files_are_passed_over_by_readers(node: Node, directory: str) -> None:
    fill(node)
    killed(node.dsn, directory, "after COMMIT")
    assert len(hidden(directory)) == 1
    assert dataset.dataset(directory, format="parquet").count_rows() == 0
    # Shells and globs of other kinds know no rule for `_`, and Python's pathlib none for `.`.
    assert list(Path(directory).glob("*.parquet")) == []


def store(root: Path, path: str) -> Folder:
    """Return a directory of a file system that is not this machine's, as far as a folder knows."""
    return Folder(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), path)


@pytest.mark.parametrize("kind", ["local", "store"])
def test_folders_are_all_alike(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a" / "b"
    folder = Folder(fs.LocalFileSystem(), str(path)) if kind == "local" else store(tmp_path, "a/b")
    folder.make()
    folder.make()
    file = folder.create("_x-1")
    file.write(b"abc")
    folder.seal("_x-1", file)
    assert list(folder.starting_with("_x")) == ["_x-1"]
    folder.rename("_x-1", "y")
    with folder.open("y") as opened:
        assert opened.read() == b"abc"
    assert ((path / "y").read_bytes(), folder.has("_x-1"), folder.has("y")) == (b"abc", False, True)
    with pytest.raises(FileNotFoundError):
        folder.rename("_x-1", "y")
    folder.delete("y")
    folder.delete("y")
    assert os.listdir(path) == []


def test_drain_into_a_store(node: Node, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = fill(node)
    monkeypatch.setattr(module, "folder", lambda path: store(Path(path).parent, Path(path).name))
    assert drain(SparkNode(dsn=node.dsn), INBOX, directory, max_messages=SMALL) == Drained(MESSAGES, 3)
    check(node, sent, directory)
    assert (len(rows(directory)), hidden(directory)) == (MESSAGES, [])


def test_directories_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to("a b")
    monkeypatch.chdir(tmp_path)
    for spelling in ("a b/x", "link/x", "link/../a b//x/", f"file:{tmp_path}/a%20b/x", f"file://{tmp_path}/link/x/"):
        assert full_name(spelling) == f"{tmp_path}/a b/x"
    with pytest.raises(ConfigurationError, match="The directory is empty"):
        full_name("")
    with pytest.raises(ConfigurationError, match="file://elsewhere/x names no directory"):
        full_name("file://elsewhere/x")


@pytest.mark.parametrize(
    ("given", "full", "of_spark"),
    [
        ("s3://bucket/x/", "s3://bucket/x", "s3a://bucket/x"),
        ("s3a://bucket/x", "s3://bucket/x", "s3a://bucket/x"),
        ("S3://bucket/a b?region=eu-west-1", "s3://bucket/a b?region=eu-west-1", "s3a://bucket/a b"),
        ("gs://bucket/x", "gs://bucket/x", "gs://bucket/x"),
        ("abfss://c@a.dfs.core.windows.net/x",) * 3,
        ("hdfs:///x/", "hdfs:///x", "hdfs:///x"),
        ("hdfs:/x", "hdfs:///x", "hdfs:///x"),
        ("hdfs://[::1]:8020/x",) * 3,
        ("/a b%20?", "/a b%20?", "file:///a b%20?"),
    ],
)
def test_directory_of_a_store_is_one_to_us_and_to_spark(given: str, full: str, of_spark: str) -> None:
    assert full_name(given) == full
    assert full_name(full) == full
    assert spark_name(full) == of_spark


@pytest.mark.parametrize(
    "directory",
    [
        "s3://me:geheim@bucket/x",
        "s3://me:geheim@at@bucket/x",
        "s3://me:ge/heim@bucket/x",
        "s3:///x?region=eu&access_key=geheim",
        "s3://bucket/x?SECRET_KEY=geheim",
        "s3://bucket/x?session%5Ftoken=geheim",
        "abfss://c@a.dfs.core.windows.net/x?sv=1;sig=geheim",
        "hdfs://host/x?myPassword",
        "file:///x?token=geheim",
    ],
)
def test_directory_holds_no_secret(directory: str) -> None:
    with pytest.raises(ConfigurationError, match="holds a password or a key") as caught:
        full_name(directory)
    assert "heim" not in str(caught.value)


def test_errors_show_neither_user_nor_query() -> None:
    with pytest.raises(ConfigurationError, match=r"^zz://host/x names no directory"):
        folder("zz://me@host/x?y=z")
    assert shown("abfss://c:geheim@a.dfs.core.windows.net/x?y") == "abfss://c@a.dfs.core.windows.net/x"
    assert shown("/a@b?c") == "/a@b?c"


def test_error_of_a_shard_shows_its_directory_without_a_query(
    node: Node, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node)
    monkeypatch.setattr(module, "folder", lambda _: Folder(fs.LocalFileSystem(), directory))
    uri = "s3://me@bucket/x?region=eu"
    leave_hidden(node, uri, 0)
    [name] = hidden(directory)
    os.unlink(f"{directory}/{name}")
    with pytest.raises(MailroomError, match=f"missing: s3://bucket/x has neither {name}"):
        drain(SparkNode(dsn=node.dsn), INBOX, uri)


def test_what_cannot_be_drained_is_told(node: Node, directory: str) -> None:
    where = SparkNode(dsn=node.dsn)
    with pytest.raises(UnknownInbox, match="There is no inbox 'billing'"):
        drain(where, "billing", directory)
    node.inbox("ledger", order="total")
    with pytest.raises(ConfigurationError, match="'ledger' has total order"):
        drain(where, "ledger", directory)
    with pytest.raises(ConfigurationError, match=r"names no directory\. Give a path, or a URI"):
        drain(where, INBOX, "zz://nowhere")
    with pytest.raises(ConfigurationError, match="shard must be an int from 0 to 999, not 1000"):
        drain(where, INBOX, directory, shard=1_000)
    with pytest.raises(InvalidMessage, match="max_messages must be an int from 1 to 1,000,000, not 0"):
        drain(where, INBOX, directory, max_messages=0)


# --- the command ------------------------------------------------------------------------------------------------------


def process(*arguments: str, dsn: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "spark_jobs.drain", *arguments],
        env={**os.environ, "MAILROOM_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_command_drains_and_tells(node: Node, directory: str) -> None:
    sent = fill(node)
    told = CliRunner().invoke(command, [INBOX, directory, "--max-messages", "100", "--json", "--dsn", node.dsn])
    expected = {"inbox": INBOX, "directory": directory, "messages": MESSAGES, "segments": 3}
    assert (told.exit_code, json.loads(told.stdout)) == (0, expected)
    check(node, sent, directory)
    told = CliRunner().invoke(command, [INBOX, directory, "--dsn-variable", "ORDERS"], env={"ORDERS": node.dsn})
    assert told.stdout == f"Drained 0 messages in 0 segments into {directory}.\n"


def test_command_ends_with_one_line(node: Node, directory: str) -> None:
    with process("billing", directory, dsn=node.dsn) as failed:
        assert failed.communicate()[1].startswith("mailroom: error: There is no inbox 'billing'")
    with process(INBOX, directory, "--shards", "2", "--dsn", node.dsn, dsn="") as refused:
        assert refused.communicate()[1].startswith("mailroom: error: The option dsn holds a password")
    with process(INBOX, directory, "--shards", "0", dsn=node.dsn) as misused:
        assert misused.communicate()[1].startswith("mailroom: error: Invalid value for '--shards'")
    assert (failed.returncode, refused.returncode, misused.returncode) == (1, 2, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_command_that_is_ended_rolls_back(node: Node, directory: str, connect: Connect, ending: signal.Signals) -> None:
    fill(node)
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    sent = fill(node)
    with connect() as other:
        other.execute("SELECT FROM mailroom.spark_drain FOR UPDATE")
        with process(INBOX, directory, dsn=node.dsn) as ended:
            eventually(lambda: waiting_drains(node))
            ended.send_signal(ending)
            assert ended.communicate(timeout=WITHIN_S) == ("", "mailroom: interrupted\n")
    assert ended.returncode == Interrupted.exit_code
    assert node.value("SELECT count(*) FROM mailroom.inbox") == sent.total()


# --- on Spark ---------------------------------------------------------------------------------------------------------


def test_shards_drain_on_spark(spark: "SparkSession", node: Node, spark_dsn: str, directory: str) -> None:
    sent = fill(node)
    where = SparkNode.of({"dsn": spark_dsn})
    directory = f"{directory} of shards"
    os.makedirs(directory)
    assert drained(spark, directory).count() == 0
    leave_hidden(node, directory, 5)
    assert drained(spark, directory).count() == 0
    assert drain_on(spark, where, INBOX, directory, 2, max_messages=SMALL).messages == MESSAGES - 20
    check(node, sent, directory)
    found = drained(spark, directory).select("message_id", "value", "sent_at").collect()
    assert Counter((row.message_id, bytes(row.value)) for row in found) == sent
    assert drain_on(spark, where, INBOX, directory, 2) == Drained(0, 0)


def test_shard_that_cannot_go_on_is_told_by_the_driver(
    spark: "SparkSession", node: Node, spark_dsn: str, directory: str
) -> None:
    fill(node)
    drain(SparkNode(dsn=node.dsn), INBOX, directory)
    node.connection.execute("UPDATE mailroom.spark_drain SET segment = 0")
    with pytest.raises(MailroomError, match=r"^Shard 0: shipping-.* already"):
        drain_on(spark, SparkNode.of({"dsn": spark_dsn}), INBOX, directory, 1)
