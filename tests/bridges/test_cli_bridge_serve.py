"""`mailroom bridge serve`: as a process that takes requests until it is told to stop, with the rights of a writer."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from click.testing import CliRunner

from mailroom import testing
from mailroom.cli.options import share
from mailroom.errors import ConfigurationError, MailroomError
from outbox import Outbox
from outbox.webhooks.cli import serve
from tests.bridges.webhooks import SECRET, signed
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.pages import page_named
from tests.support.roles import rights, role
from tests.support.waiting import WITHIN_S, eventually

ORDER = b'{"order": 1}'
# Requests in hand have a minute on a busy machine, also for a lock; who is refused is not waited for.
RUN = (
    "import runpy; from mailroom.cli import asgi; from outbox.webhooks import app, sessions; "
    "asgi.STOP_S, app.LINGER_S, sessions.PATIENCE = {stop_s}, 0.1, \"SET LOCAL lock_timeout = '60s'\"; "
    "sessions.ANSWER_S = 60.0; runpy.run_module('mailroom', run_name='__main__')"
)


@contextmanager
def running(dsn: str, *arguments: str, stop_s: float = WITHIN_S) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the command; yield it and its port once it listens."""
    program = [sys.executable, "-c", RUN.format(stop_s=stop_s), "bridge", "serve"]
    call = subprocess.Popen(
        [*program, "--topics", "order.#", "--port", "0", *arguments],
        env={**os.environ, "MAILROOM_DSN": dsn, "MAILROOM_BRIDGE_SHOP_SECRETS": f"whsec_{'REVG' * 8}, {SECRET}"},
        text=True,
        stderr=subprocess.PIPE,
    )
    try:
        assert call.stderr is not None
        line = call.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/topics/", line)
        assert found, line + call.stderr.read()
        yield call, int(found[1])
    finally:
        call.kill()
        call.communicate()


def now_signed(body: bytes, id: str) -> dict[str, str]:
    return signed(body, id, at=int(time.time()))


def raw(port: int, text: bytes) -> bytes:
    """Send bytes as they are, and return the status that comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as client:
        client.sendall(text)
        return client.recv(len(b"HTTP/1.1 413"), socket.MSG_WAITALL)


@pytest.mark.slow
def test_process_takes_requests_as_a_writer_and_answers_those_in_hand_when_it_is_stopped(
    node: Node, connect: Connect
) -> None:
    with (
        role(node.dsn, *rights("writer")) as (_, dsn),
        running(dsn, "--name", "shop", "--max-bytes", "100") as (call, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_S) as client,
    ):
        for _ in range(2):
            first = client.post("/topics/order.paid?key=a", content=ORDER, headers=now_signed(ORDER, "msg_1"))
            assert first.status_code == 202, first.text
        assert "server" not in first.headers
        assert client.get("/healthz").status_code == 200
        assert client.post("/topics/order.paid", content=ORDER).status_code == 415
        lines = "".join(f"{name}: {text}\r\n" for name, text in now_signed(b"", "msg_2").items())
        head = f"POST /topics/order.paid HTTP/1.1\r\nhost: x\r\n{lines}".encode()
        chunk = b"32\r\n" + b"1" * 50 + b"\r\n"
        for text in (b"transfer-encoding: chunked\r\n\r\n" + chunk * 3, b"content-length: 101\r\n\r\n"):
            assert raw(port, head + text) == b"HTTP/1.1 413"  # before the rest, which never comes
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(head + b"content-length: 50\r\n\r\n{")
        holder = connect()
        Outbox().send(holder, "order.paid", 0, once="msg_2")
        answers: list[httpx.Response] = []
        in_hand = threading.Thread(
            target=lambda: answers.append(
                client.post("/topics/order.paid?key=b", content=ORDER, headers=now_signed(ORDER, "msg_2"))
            )
        )
        in_hand.start()
        eventually(lambda: node.sessions("mailroom bridge serve", "wait_event_type = 'Lock'"))
        call.send_signal(signal.SIGTERM)
        with pytest.raises(OSError, match="refused"):
            eventually(lambda: socket.create_connection(("127.0.0.1", port)).close())
        holder.rollback()
        _, error = call.communicate(timeout=WITHIN_S)
        in_hand.join()
        assert (call.returncode, answers[0].status_code) == (0, 202), error
        assert "Traceback" not in error
        assert SECRET not in error
    assert [message.key for message in testing.sent(node.connection, "order.paid")] == ["a", "b"]


@pytest.mark.slow
def test_process_ends_in_time_although_a_client_is_still_sending(node: Node) -> None:
    with (
        running(node.dsn, "--unsigned", stop_s=0.1) as (call, port),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(b"POST /topics/order.paid HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.sendall(b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100")  # it is reading the body
        call.send_signal(signal.SIGTERM)
        call.communicate(timeout=WITHIN_S)
        assert call.returncode == 0


def refusal(*arguments: str, **environment: str) -> MailroomError | str:
    """Call the command in this process, and return its error."""
    share(serve)
    result = CliRunner().invoke(
        serve, ["--topics", "order.paid", *arguments], env={"MAILROOM_DSN": "postgresql://127.0.0.1:1/x", **environment}
    )
    assert result.exit_code in (1, 2)
    assert not result.stdout
    return result.exception if isinstance(result.exception, MailroomError) else result.stderr


def test_secrets_are_in_the_environment_and_nowhere_else() -> None:
    found = refusal()
    assert isinstance(found, ConfigurationError)
    assert found.code == "MR-webhook-secret-invalid"
    assert "MAILROOM_BRIDGE_SERVE_SECRETS" in str(found)
    assert "MAILROOM_BRIDGE_MY_SHOP_SECRETS" in str(refusal("--name", "my-shop"))
    bad = refusal(MAILROOM_BRIDGE_SERVE_SECRETS="hunter2")
    assert "Secret 1" in str(bad)
    assert "hunter2" not in str(bad)
    both = refusal("--unsigned", MAILROOM_BRIDGE_SERVE_SECRETS=SECRET)
    assert isinstance(both, MailroomError)
    assert both.code == "MR-arguments-conflict"
    options = {option for parameter in serve.params for option in parameter.opts}
    assert not [option for option in options if "secret" in option]


def test_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = refusal("--port", port, MAILROOM_BRIDGE_SERVE_SECRETS=SECRET)
    assert isinstance(found, ConfigurationError)
    assert found.code == "MR-webhook-address"
    assert f"port {port}" in str(found)


def test_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    found = refusal(MAILROOM_BRIDGE_SERVE_SECRETS=SECRET)
    assert isinstance(found, ConfigurationError)
    assert "pip install 'pg-mailroom[webhook]'" in str(found)


def test_pattern_that_is_none_is_wrong_usage() -> None:
    assert "Topic pattern 'order.*.#' is not valid" in str(refusal("--topics", "order.*.#"))


@pytest.mark.slow
def test_example_with_curl_on_the_page_is_taken_and_sends_once(node: Node) -> None:
    page = page_named("webhooks.md").read_text()
    [script] = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    assert "http://127.0.0.1:8080/" in script
    with running(node.dsn, "--name", "shop") as (_, port):
        environment = {**os.environ, "MAILROOM_BRIDGE_SERVE_SECRETS": SECRET}
        command = ["sh", "-ec", script.replace(":8080/", f":{port}/")]
        answers = {subprocess.run(command, env=environment, capture_output=True, check=True).stdout for _ in range(2)}
    [message] = testing.sent(node.connection, "order.paid")
    assert answers == {f'{{"id": "{message.id}"}}\n'.encode()}
    assert (message.key, message.value) == ("order-42", {"order": 42})
