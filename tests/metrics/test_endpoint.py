"""The endpoint: what each path answers, and what a scrape does when the database is away."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.client import HTTPConnection
from typing import Any

import pytest
from click.testing import CliRunner

from dispatcher import Dispatcher
from inbox import Message, Worker
from mailroom.cli.commands.health import health
from mailroom.errors import ConfigurationError
from mailroom.health import Health
from mailroom.metrics.endpoint import Endpoint, host_and_port
from mailroom.metrics.process import ProcessMetrics
from mailroom.metrics.scrape import Scrape
from mailroom.session.home import Home
from tests.support.node import Node
from tests.support.port import free_port
from tests.support.proxy import proxied
from tests.support.roles import role
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import LEDGER, NEVER_S, deliver, ledger_keys, working, write_ledger

SINCE = datetime(2026, 3, 1, tzinfo=UTC)
WELL = Health("dispatcher", "awake", True, True, SINCE)
ILL = Health("executor", "connecting", False, False, SINCE, "ConnectionFailed")


class Told:
    """Something that is as the test says."""

    def __init__(self, health: Health) -> None:
        self.is_now = health

    def health(self) -> Health:
        return self.is_now


def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(dsn: str, process: ProcessMetrics | None = None) -> Scrape:
    return Scrape(lambda: Home(dsn), process or ProcessMetrics())


@pytest.fixture
def told() -> list[Told]:
    return [Told(WELL), Told(ILL)]


@pytest.fixture
def port(told: list[Told]) -> Iterator[int]:
    with Endpoint("127.0.0.1:0", told, []) as endpoint:
        yield endpoint.port


def test_alive_ready_and_started_are_three_questions(port: int, told: list[Told]) -> None:
    assert asked(port, "/livez") == (200, "alive\n")
    status, body = asked(port, "/readyz")
    assert status == asked(port, "/startupz")[0] == 503
    assert json.loads(body)[1] == {
        "name": "executor", "state": "connecting", "ready": False, "has_begun": False,
        "since": "2026-03-01T00:00:00+00:00", "why": "ConnectionFailed",
    }  # fmt: skip
    told[1].is_now = Health("executor", "connecting", False, True, SINCE, "ConnectionFailed")
    assert (asked(port, "/readyz")[0], asked(port, "/startupz")[0]) == (503, 200)
    told[1].is_now = WELL
    assert asked(port, "/readyz?verbose")[0] == 200
    assert asked(port, "/readyz", "HEAD") == (200, "")
    assert asked(port, "/")[0] == 404


def test_the_command_asks_a_process_and_says_so_by_its_exit_code(
    port: int, told: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mailroom.cli.commands.health.WITHIN_S", WITHIN_S)

    def run(*options: str) -> Any:
        return CliRunner().invoke(health, ["--metrics", f"127.0.0.1:{port}", *options])

    failed = run()
    assert failed.exit_code == 1
    assert "ConnectionFailed" in failed.output
    told[1].is_now = WELL
    assert run().exit_code == run("--started").exit_code == 0
    assert "No process answers" in str(CliRunner().invoke(health, ["--metrics", f"127.0.0.1:{free_port()}"]).exception)


def test_an_address_that_cannot_be_had_is_refused(port: int) -> None:
    for address in (f"127.0.0.1:{port}", "9464", "host:", "host:99999"):
        with pytest.raises(ConfigurationError):
            Endpoint(address, [], [])
    assert host_and_port(":9464") == ("", 9464)
    assert host_and_port("[::1]:9464") == ("::1", 9464)


def test_a_worker_s_metrics_and_health(node: Node) -> None:
    node.inbox("shipping")
    node.connection.execute(LEDGER)
    deliver(node, "a", "b")
    name = node.value("SELECT name FROM mailroom.node")
    reaped = f'mailroom_messages_reaped_total{{node="{name}",inbox="shipping"}} 2\n'
    process = ProcessMetrics()
    end = process.listen()
    worker = Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)
    try:
        with Endpoint("127.0.0.1:0", [worker], [scrape(node.dsn, process)]) as endpoint:
            assert asked(endpoint.port, "/startupz")[0] == 503
            with working(worker):
                eventually(lambda: len(ledger_keys(node)) == 2 and worker.health().ready)
                assert asked(endpoint.port, "/readyz")[0] == 200
                eventually(lambda: reaped in asked(endpoint.port, "/metrics")[1])
                assert f'mailroom_database_up{{node="{name}"}} 1\n' in asked(endpoint.port, "/metrics")[1]
            assert asked(endpoint.port, "/readyz")[0] == 503
            assert asked(endpoint.port, "/startupz")[0] == 200
    finally:
        end()


def test_a_worker_whose_loop_stands_still_is_not_ready_and_one_that_handles_is(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.inbox("shipping")
    begun, ends = threading.Event(), threading.Event()

    def handle(message: Message, _: Any) -> None:
        begun.set()
        ends.wait(60)

    worker = Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)
    with working(worker):
        eventually(lambda: worker.health().ready)
        monkeypatch.setattr("inbox.worker.worker.LEAST_IDLE_S", 0.0)
        monkeypatch.setattr(worker, "_options", replace(worker._options, poll_interval_s=1e-9))
        eventually(lambda: "claimed nothing" in str(worker.health().why))
        assert not worker.health().ready
        deliver(node, "a")
        assert begun.wait(60)
        assert worker.health().ready
        ends.set()


async def test_a_lane_is_ready_while_it_leads_or_stands_by_and_not_while_it_connects(node: Node) -> None:
    with proxied(node.dsn) as (network, dsn):
        first, second = Dispatcher(dsn), Dispatcher(node.dsn)
        assert (first.health().state, first.health().ready, first.health().has_begun) == ("connecting", False, False)
        leads = asyncio.create_task(first.run())
        await eventually_async(lambda: first.health().state in ("awake", "asleep"))
        stands_by = asyncio.create_task(second.run())
        await eventually_async(lambda: second.health().state == "standing by")
        await eventually_async(lambda: first.health().ready and second.health().ready)
        network.cut()
        await eventually_async(lambda: first.health().state == "connecting")
        assert not first.health().ready
        assert first.health().why
        network.restore()
        await eventually_async(lambda: first.health().ready and first.health().has_begun)
        for lane in (first, second):
            lane.stop()
        await asyncio.gather(leads, stands_by)


def test_a_scrape_goes_on_without_the_database_and_with_it_again(node: Node) -> None:
    with proxied(node.dsn) as (network, dsn):
        looks = scrape(dsn)
        try:
            network.cut()
            assert looks.read() is None  # nobody knows the node's name yet
            network.restore()
            found = looks.read()
            assert found is not None
            name = found[0]
            network.cut()
            found = looks.read()
            assert found is not None
            assert (found[0], _up(found[1])) == (name, 0)
            network.restore()
            found = looks.read()
            assert found is not None
            assert _up(found[1]) == 1
        finally:
            looks.close()


def _up(metrics: Any) -> Any:
    [(value)] = [value for family, samples in metrics.items() if family.name == "database_up" for _, value in samples]
    return value


def test_a_scrape_that_may_not_read_is_told_once_what_to_grant(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with role(node.dsn, "GRANT USAGE ON SCHEMA mailroom TO {role}") as (_, dsn):
        refused = scrape(dsn)
        assert refused.read() is None
        assert refused.read() is None
        refused.close()
    [told] = [record.getMessage() for record in caplog.records if record.name == "mailroom.metrics"]
    assert "mailroom grant metrics ROLE" in told


def test_a_scraper_that_goes_away_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    answered = threading.Event()

    class Slow(Told):
        def health(self) -> Health:
            asking.close()  # whoever asked has gone before there is an answer
            answered.set()
            return self.is_now

    with Endpoint("127.0.0.1:0", [Slow(WELL)], []) as endpoint:
        asking = socket.create_connection(("127.0.0.1", endpoint.port))
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        asking.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert answered.wait(WITHIN_S)
        assert asked(endpoint.port, "/livez")[0] == 200
    assert "Traceback" not in capsys.readouterr().err
