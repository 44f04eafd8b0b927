"""`mailroom dashboard`: a process that serves until it is told to stop, and refuses to start where others would act."""

import re
import signal
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from dispatcher.cli.dashboard import dashboard, is_loopback, resolver
from dispatcher.dashboard.access import Local, ProxyHeader, Tokens
from mailroom.cli.options import share
from mailroom.errors import ConfigurationError
from tests.dashboard.serving import running
from tests.support.node import Node
from tests.support.roles import rights, role
from tests.support.waiting import WITHIN_S

share(dashboard)


@pytest.mark.slow
def test_process_serves_an_auditor_until_it_is_stopped(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    node.send("nobody", key="k")
    node.deliver_all()
    with (
        role(node.dsn, *rights("auditor")) as (name, dsn),
        running(dsn) as (call, at),
        httpx.Client(base_url=at, timeout=WITHIN_S) as client,
    ):
        pages = ("/", "/inboxes", "/inboxes/shipping", "/inboxes/shipping/key?key=k", "/parked", "/dead-letters",
                 "/routes?topic=order.paid", "/waiting", "/executables", "/workers", "/links", "/doctor/findings",
                 "/audit", "/message/path?id=3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11")  # fmt: skip
        answers = {path: client.get(path) for path in pages}
        assert {path: each.status_code for path, each in answers.items()} == dict.fromkeys(pages, 200)
        assert "server" not in answers["/"].headers
        [csrf] = set(re.findall(r'name="csrf" value="([0-9a-f]{64})"', answers["/dead-letters"].text))
        fields = {"csrf": csrf, "id": "1", "why": "x"}
        refused = client.post("/act/requeue/dead-letter", data=fields, headers={"origin": at})
        assert refused.status_code == 503
        assert "mailroom grant operator" in refused.text
        assert name not in refused.text
        call.send_signal(signal.SIGTERM)
        _, error = call.communicate(timeout=WITHIN_S)
        assert call.returncode == 0, error
        assert "Traceback" not in error
    assert node.dead()


def called(*arguments: str) -> Result:
    return CliRunner().invoke(dashboard, arguments, env={"MAILROOM_DSN": "postgresql://127.0.0.1:1/none"})


def test_without_auth_it_does_not_start_where_others_reach_it() -> None:
    for host in ("0.0.0.0", "10.0.0.7", "::", "", "ops.example.org"):
        error = called("--host", host).exception
        assert isinstance(error, ConfigurationError), host
        assert error.code == "MR-dashboard-access"
        assert "--auth" in str(error)


def test_at_all_addresses_it_needs_a_name() -> None:
    for host in ("0.0.0.0", "::"):
        error = called("--host", host, "--auth", "header:X-User").exception
        assert isinstance(error, ConfigurationError), host
        assert "--name" in str(error)


def test_wrong_usage() -> None:
    for arguments in (("--auth", "none"), ("--auth", "tokens:"), ("--proxy", "10.0.0.5")):
        assert called(*arguments).exit_code == 2, arguments


def test_a_right_or_a_database_that_there_is_not() -> None:
    error = called("--may", "drop").exception
    assert isinstance(error, ConfigurationError)
    assert "'drop' is not a right" in str(error)
    assert type(called().exception).__name__ == "ConnectionFailed"


def test_who_may_use_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"ada everything {'t' * 32}")
    assert isinstance(resolver(None, "127.0.0.1", (), "everything"), Local)
    assert isinstance(resolver(f"tokens:{file}", "0.0.0.0", (), "everything"), Tokens)
    assert isinstance(resolver("header:X-User", "0.0.0.0", ("10.0.0.5",), "everything"), ProxyHeader)


def test_what_is_this_machine() -> None:
    hosts = ["127.0.0.1", "127.1.2.3", "::1", "localhost", "", "0.0.0.0"]
    assert [host for host in hosts if is_loopback(host)] == hosts[:4]
