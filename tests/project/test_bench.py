"""The benchmarks: each completes and reports in the documented form. Tests do not measure speed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mailroom.cli.root import root
from mailroom.values import codec
from mailroom_bench import dead_source, peer_handwritten, peer_pgq, peer_pgqueuer, workload
from mailroom_bench.cli import FEWEST_MESSAGES, MEASUREMENTS
from mailroom_bench.clients import rate_of
from mailroom_bench.cost import UNMETERED
from mailroom_bench.live_side import PROCESSES, Reading, found
from mailroom_bench.measure import Bar, Line, Measurement, Setup, measure
from mailroom_bench.node import Node, fresh_node
from mailroom_bench.pipeline import Mark
from mailroom_bench.processor import Meter, spent_us, used_s
from mailroom_bench.publish import sending
from tests.spark import quick
from tests.support.databases import Connect
from tests.support.waiting import WITHIN_S, eventually

ROOT = Path(__file__).parents[2]


def _bench(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(root, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _bench_apart(directory: Path, *arguments: str) -> dict[str, Any]:
    """The same in a process of its own, since Java keeps the environment, and the password in it, it began with."""
    command = [sys.executable, "-m", "mailroom", "bench", *arguments, "--json"]
    quick_spark = {"PYSPARK_PYTHON": str(quick.python(directory)), "SPARK_SUBMIT_OPTS": quick.JAVA}
    ended = subprocess.run(command, check=True, capture_output=True, env=os.environ | quick_spark)
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def _figures(*runs: Mapping[str, float], lines: tuple[Line, ...]) -> list[Any]:
    todo = iter(runs)
    measurement = Measurement("made up", "for the test", lines, lambda _setup: next(todo))
    return list(measure(measurement, Setup("", 1), len(runs)))


LONG = ("bridges", "cost", "logs", "stuck", "waiting")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in LONG else []) for name in MEASUREMENTS]
)
def test_a_measurement_completes_and_reports_every_line(
    dsn: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_source, "SOURCES", 3)  # each is a schema, twice: with all ten that is all it would do
    if missing := MEASUREMENTS[name].missing():
        pytest.skip(missing)
    run = partial(_bench_apart, tmp_path) if name == "spark" else _bench
    document = run("--dsn", dsn, "--only", name, "--runs", "1", "--messages", str(FEWEST_MESSAGES))
    measured = MEASUREMENTS[name].without(MEASUREMENTS[name].absent(dsn))
    assert [figure["name"] for figure in document["figures"]] == [line.name for line in measured.lines]
    assert (document["runs"], document["messages"]) == (1, FEWEST_MESSAGES)
    for figure in document["figures"]:
        assert figure["measurement"] == name
        assert figure["value"] is None or figure["value"]["median"] > 0
        assert (figure["ratio"] is None) or figure["to"]
        assert figure["met"] in (None, True, False)


@pytest.mark.nightly  # minutes, in which it measures; what --against refuses is below
@pytest.mark.parametrize(
    ("name", "messages", "encodes", "does_not"),
    [
        # Batches, of which a message takes a twentieth of what the slow encoding does: no noise turns that round.
        ("cost", FEWEST_MESSAGES, "bulk, publisher", "bulk, publisher's backend"),
        # Its processes are started by the other side's. With fewer messages they may all be sent before it counts.
        ("live", 3_000, "publisher, 1,000 keys", "publisher's backend, 1,000 keys"),
    ],
)
def test_another_checkout_is_measured_beside_ours(
    dsn: str, tmp_path: Path, name: str, messages: int, encodes: str, does_not: str
) -> None:
    for package in ("mailroom", "outbox", "inbox", "dispatcher", "alembic"):
        shutil.copytree(ROOT / package, tmp_path / package)
    slow = (
        "def encode(value: object, *, max_bytes: int = MAX_VALUE_BYTES) -> bytes:\n    for _ in range(20_000): pass\n"
    )
    codec_of_theirs = tmp_path / "mailroom" / "values" / "codec.py"
    codec_of_theirs.write_text(re.sub(r"^def encode\(.*\n", slow, codec_of_theirs.read_text(), flags=re.M))
    few = ("--runs", "1", "--messages", str(messages))
    document = _bench("--dsn", dsn, "--only", name, "--against", str(tmp_path), *few)
    figures = {figure["name"]: figure["value"] and figure["value"]["median"] for figure in document["figures"]}
    for line in MEASUREMENTS[name].lines:
        if line.baseline in UNMETERED:
            continue
        ours, theirs, ratio = (figures[each] for each in (line.name, f"{line.name}, before", f"{line.name} : before"))
        if ours and theirs:
            assert ratio == pytest.approx(ours / theirs)
    # Theirs is slow where it encodes, and there alone.
    assert figures[f"{encodes} : before"] < figures[f"{does_not} : before"] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "deliver"), "is for --only cost"),
        ((), "is for --only cost"),
        (("--only", "cost"), "is not a checkout of Mailroom"),
    ],
)
def test_against_is_refused_where_there_is_nothing_to_measure(
    dsn: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(root, ["bench", "--dsn", dsn, "--against", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert message in result.output


def test_processor_time_is_that_of_the_named_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            meter = Meter({"busy": busy.pid, "us": os.getpid()})
            eventually(lambda: used_s(busy.pid) > 0.1)
            before = used_s(busy.pid)
            with meter.running():
                eventually(lambda: used_s(busy.pid) - before > 0.2)
            idle = used_s(os.getpid())
        finally:
            busy.kill()
    each = meter.each_us(10)
    assert each["busy"] >= 20_000
    assert each["us"] * 10 / 1e6 < 0.2
    assert idle == pytest.approx(time.process_time(), abs=0.2)


def test_the_cost_of_many_processes_counts_those_that_have_begun_in_between() -> None:
    assert spent_us({1: 1.0, 2: 5.0}, {1: 1.5, 3: 0.25}, 1_000) == pytest.approx(750)
    assert isnan(spent_us({}, {}, 0))


@pytest.mark.slow
def test_a_terminated_run_ends_with_all_its_processes(dsn: str, connect: Connect) -> None:
    command = [sys.executable, "-m", "mailroom", "bench", "--dsn", dsn, "--only", "memory"]
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with connect(autocommit=True) as connection, subprocess.Popen(command, stderr=subprocess.DEVNULL) as bench:
        try:
            eventually(lambda: connection.execute(f"{sessions} AND state ~ 'transaction'").fetchone() != (0,))
            bench.terminate()
            bench.wait(WITHIN_S)
            eventually(lambda: connection.execute(sessions).fetchone() == (0,))
        finally:
            bench.kill()


@pytest.mark.slow
def test_a_run_leaves_no_schema_behind(dsn: str, connect: Connect) -> None:
    count = "SELECT count(*) FROM pg_namespace"
    with connect(autocommit=True) as connection:
        before = connection.execute(count).fetchone()
        with pytest.raises(ZeroDivisionError), fresh_node(dsn):
            raise ZeroDivisionError
        assert connection.execute(count).fetchone() == before


def test_a_ratio_is_taken_within_each_run() -> None:
    # The medians of the two lines are 20 and 10; of the ratios it is 4.
    lines = (Line("floor"), Line("ours", baseline="floor", bar=Bar(ratio_at_least=3)))
    _, ours = _figures({"floor": 10, "ours": 40}, {"floor": 1, "ours": 20}, {"floor": 20, "ours": 10}, lines=lines)
    assert (ours.value.median, ours.value.low, ours.value.high) == (20, 10, 40)
    assert (ours.ratio.median, ours.ratio.low, ours.ratio.high) == (4, 0.5, 20)
    assert ours.met is True


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (Bar(ratio_at_least=2), True),
        (Bar(ratio_at_least=2.1), False),
        (Bar(ratio_at_most=1.9), False),
        (Bar(at_least=20, ratio_at_least=2), True),
        (Bar(at_least=21, ratio_at_least=2), False),
        (Bar(at_most=19), False),
    ],
)
def test_a_bar_is_met_only_if_all_its_limits_are_kept(bar: Bar, met: bool) -> None:
    _, ours = _figures({"floor": 10, "ours": 20}, lines=(Line("floor"), Line("ours", baseline="floor", bar=bar)))
    assert ours.met is met


def test_too_few_messages_get_no_result() -> None:
    [figure] = _figures({"rate": nan}, {"rate": 5}, {"rate": 6}, lines=(Line("rate", bar=Bar(at_least=1)),))
    assert figure.met is None


def test_values_take_200_bytes_and_come_equally_often_per_key() -> None:
    messages = list(workload.outgoing(40, keys=10))
    assert {len(codec.encode(message.value)) for message in messages} == {workload.VALUE_BYTES}
    keys = [message.key for message in messages]
    assert {keys.count(key) for key in keys} == {4}


@pytest.mark.slow
def test_messages_sent_by_sql_have_the_keys_that_python_gives(dsn: str, connect: Connect) -> None:
    with fresh_node(dsn) as node, connect(autocommit=True) as connection:
        node.send(25, keys=10)
        rows = connection.execute(f"SELECT key FROM {node.outbox} ORDER BY position".encode()).fetchall()
    assert [key for (key,) in rows] == [workload.key(nth, 10) for nth in range(25)]


def test_a_client_that_cannot_begin_fails_the_measurement(dsn: str) -> None:
    nobody = Node("postgresql://localhost:1/nowhere", "nowhere")
    with pytest.raises(Exception, match="Cannot connect"):
        rate_of(2, sending, nobody, 1)


def test_without_a_peer_its_lines_are_left_out_and_ours_beside_them() -> None:
    lines = (
        Line("theirs", peer="a peer"),
        Line("ours", baseline="theirs", bar=Bar(ratio_at_least=1), peer="a peer"),
        Line("another's", peer="another"),
        Line("ours again", baseline="another's", bar=Bar(ratio_at_least=1), peer="another"),
    )
    left = Measurement("made up", "for the test", lines, lambda _setup: {}).without({"a peer"})
    assert left.lines == lines[2:]


@pytest.mark.nightly
def test_what_to_install_is_said_for_each_absent_peer(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pgqueuer, "find_spec", lambda _name: None)
    monkeypatch.setattr(peer_pgq, "EXTENSION", "no_such_extension")
    few = ("--runs", "1", "--messages", str(FEWEST_MESSAGES))
    result = CliRunner().invoke(root, ["bench", "--dsn", dsn, "--only", "peers", *few, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)["figures"]
    assert {figure["name"].split(",")[0] for figure in figures} == {"hand-written", "Mailroom beside hand-written"}
    assert re.search(r"PgQ is left out\. .*apt-get install postgresql-\d+-pgq3", result.stderr)
    assert "PgQueuer is left out. Run: pip install 'pg-mailroom[peers]'" in result.stderr


def test_values_for_peers_have_the_size_and_the_keys_of_ours() -> None:
    rows = list(workload.texts(3))
    assert {len(text) for _, text in rows} == {workload.VALUE_BYTES}
    assert [workload.number(json.loads(text)) for _, text in rows] == [0, 1, 2]
    assert [key for key, _ in rows] == [message.key for message in workload.outgoing(3)]
    assert list(workload.encoded(3)) == rows


def test_the_hand_written_queue_is_the_one_that_the_page_shows() -> None:
    page = " ".join((ROOT / "docs" / "understand" / "benchmarks.md").read_text().split())
    for statement in (peer_handwritten.TABLE, peer_handwritten.COPY, peer_handwritten.TAKE, peer_handwritten.NOTIFY):
        assert " ".join(statement.split()) in page


def _reading(time_s: float, sent: int, delivered: int, handled: int, used_s: float, wal: int) -> Reading:
    used = {name: {nth: used_s} for nth, name in enumerate(PROCESSES)}
    return Reading(Mark(time_s, handled), sent, (delivered // 100, delivered), (handled // 10, handled), wal, used)


def test_each_live_process_is_divided_by_the_messages_that_it_had_itself() -> None:
    # The publisher ran ahead, and the dispatcher a little.
    figures = found(_reading(1.0, 500, 500, 500, 0.5, 1_000), _reading(3.0, 4_500, 2_500, 1_500, 1.5, 501_000))
    assert figures == {
        "rate": 500,
        "publisher": pytest.approx(250),
        "publisher's backend": pytest.approx(250),
        "dispatcher": pytest.approx(500),
        "dispatcher's backends": pytest.approx(500),
        "workers": pytest.approx(1_000),
        "workers' backends": pytest.approx(1_000),
        "all": pytest.approx(3_500),
        "WAL": 500,
        "rows per delivery": 100,
        "rows per claim": 10,
    }


def test_a_live_run_of_too_few_messages_has_no_figures() -> None:
    reading = _reading(1.0, 500, 500, 500, 0.5, 1_000)
    assert all(isnan(value) for value in found(reading, reading).values())


def test_an_unknown_measurement_is_refused() -> None:
    result = CliRunner().invoke(root, ["bench", "--only", "nothing"])
    assert result.exit_code == 2
