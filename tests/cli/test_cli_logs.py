"""Logs: what they say of failures, with a command that is right, and their form for programs."""

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from dispatcher import execute_all
from dispatcher.delivery.dead import TOLD
from inbox import Worker
from mailroom.cli.logs import FIELDS, JsonFormatter
from mailroom.errors import DecodeError
from mailroom.values import shell
from outbox import Outbox
from tests.support.command import done, mailroom, process
from tests.support.executing import STORE, function, sent
from tests.support.node import Node
from tests.support.pages import page_named
from tests.support.waiting import WITHIN_S, eventually
from tests.support.working import working

ODD = 'it\'s $HOME "x" `id`\n\t\x1b[31m ü \\ -k'


# -- The form ---------------------------------------------------------------------------------------------------------


def record(**fields: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "mailroom.worker", "levelname": "WARNING", "msg": "failed", **fields})


def test_json_is_one_object_per_line_with_the_fields_we_name() -> None:
    text = JsonFormatter().format(
        record(
            created=0.25,
            msg="line\n%s",
            args=("two",),
            inbox="shipping",
            attempt=2,
            key="k",
            value="secret",
            topic=None,
        )
    )
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "1970-01-01T00:00:00.250+00:00", "level": "WARNING", "logger": "mailroom.worker",
        "message": "line\ntwo", "inbox": "shipping", "attempt": 2, "key": "k",
    }  # fmt: skip


def test_frames_stand_beside_the_message() -> None:
    found = json.loads(JsonFormatter().format(record(msg="%s%s", args=("failed", "\nFile x"), frames="\nFile x")))
    assert (found["message"], found["exception"]) == ("failed", "File x")


def test_exception_is_told_without_its_text() -> None:
    try:
        raise ValueError("secret")
    except ValueError:
        found = JsonFormatter().format(record(exc_info=sys.exc_info()))
    where = json.loads(found)["exception"]
    assert "test_exception_is_told_without_its_text" in where
    assert where.endswith("ValueError")
    assert "secret" not in json.loads(found)["message"]


def test_page_lists_the_fields() -> None:
    page = page_named("logs.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| [A-Z]", page, re.MULTILINE) == [*FIELDS, "exception"]


# -- The option -------------------------------------------------------------------------------------------------------

NOWHERE = "postgresql://u:pw@127.0.0.1:1/x"


def is_json(*arguments: str, variable: str = "") -> bool:
    result = mailroom(*arguments, dsn=NOWHERE, MAILROOM_LOG_FORMAT=variable)
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    if not line.startswith("{"):
        return False
    found = json.loads(line)
    assert (found["level"], found["code"]) == ("ERROR", "MR-connection-failed")
    assert "pw" not in line
    return True


def test_option_counts_more_than_the_environment_wherever_it_stands() -> None:
    assert not is_json("status")
    assert is_json("status", "--log-format", "json")
    assert is_json("--log-format", "json", "status")
    assert is_json("status", variable="json")
    assert not is_json("--log-format", "text", "status", variable="json")
    assert not is_json("status", "--log-format", "text", variable="json")


def test_format_that_is_not_there_is_wrong_usage() -> None:
    result = mailroom("status", dsn=NOWHERE, MAILROOM_LOG_FORMAT="xml")
    assert result.exit_code == 2
    assert "MAILROOM_LOG_FORMAT" in result.stderr


@pytest.mark.slow
def test_dispatcher_logs_json_alone(node: Node) -> None:
    call = process("dispatcher", "run", "--log-format", "json", dsn=node.dsn, stdout=subprocess.PIPE)
    try:
        assert call.stderr is not None
        line = json.loads(call.stderr.readline())
        call.terminate()
        output, rest = call.communicate(timeout=WITHIN_S)
    finally:
        call.kill()
    assert (line["level"], line["logger"]) == ("INFO", "mailroom.dispatcher")
    assert line["lane"] in line["message"]
    assert all(json.loads(each)["level"] for each in rest.splitlines())
    assert (call.returncode, output) == (0, "")


# -- Failures ---------------------------------------------------------------------------------------------------------


def of(caplog: pytest.LogCaptureFixture, outcome: str) -> list[Any]:
    return [each for each in caplog.records if getattr(each, "outcome", None) == outcome]


@pytest.mark.parametrize(
    ("order", "on_failure", "attempts"), [("key", "park", 2), ("total", "park", 1), ("key", "skip", 1)]
)
def test_last_attempt_is_an_error_with_the_command_to_run(
    node: Node, caplog: pytest.LogCaptureFixture, order: str, on_failure: str, attempts: int
) -> None:
    node.inbox("shipping", "order.paid", backoff_s=0, order=order, on_failure=on_failure, max_attempts=attempts)
    id = node.send("order.paid", "secret", key=ODD)
    node.deliver_all()

    def handle(message: Any, connection: Any) -> None:
        raise ValueError(message.value)

    table = "dead_letter" if on_failure == "skip" else "key_state WHERE retry_at = 'infinity'"
    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: of(caplog, on_failure) and node.rows(f"SELECT FROM mailroom.{table}"))
        # What was parked is moved by the next claim.
        eventually(lambda: on_failure == "skip" or order == "total" or node.rows("SELECT FROM mailroom.parked"))
    [last] = of(caplog, on_failure)
    assert (last.levelname, last.message_id, last.topic, last.key) == ("ERROR", id, "order.paid", ODD)
    assert (last.inbox, last.error, last.attempt, last.attempts) == ("shipping", "ValueError", attempts, attempts)
    first_line = last.getMessage().splitlines()[0]
    assert first_line.startswith(f"shipping: {id} (topic order.paid, key {ODD!r}) failed, attempt {attempts} of ")
    assert first_line.endswith(f"{on_failure}. See: {last.command}")
    assert "in handle" in json.loads(JsonFormatter().format(last))["exception"]
    assert [each.levelname for each in of(caplog, "retry")] == ["WARNING"] * (attempts - 1)
    assert "secret" not in caplog.text
    text = done(*words(last.command), dsn=node.dsn)
    assert "ValueError" in text


def words(command: str) -> list[str]:
    """Return the arguments that a shell makes of a command, without its name."""
    program = f'mailroom() {{ printf "%s\\0" "$@"; }}; {command}'
    found = subprocess.run(["bash", "-c", program], capture_output=True, check=True).stdout.decode()
    return found.split("\0")[:-1]


def test_a_shell_reads_the_words_that_were_meant() -> None:
    for text in (ODD, "order-42", "--all", "a b", "'", "\x7f\u2028", ""):
        command = shell.command("parked", "show", "shipping", "--key", text, schema="tenant_a")
        assert words(command) == ["parked", "show", "shipping", "--key", text, "--schema", "tenant_a"]
        assert command.isprintable()


def test_code_of_an_error_of_ours_is_a_field(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.inbox("shipping")
    node.send("shipping", key="k")
    node.deliver_all()
    node.connection.execute("UPDATE mailroom.inbox SET value = '\\xff'")

    def handle(message: Any, connection: Any) -> None:
        assert message.value

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: of(caplog, "park"))
    assert of(caplog, "park")[0].code == DecodeError.code


def test_message_that_cannot_be_delivered_is_told_by_itself(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.inbox("shipping", "order.paid")
    node.connection.execute("ALTER TABLE mailroom.inbox_shipping ADD CONSTRAINT no_such_key CHECK (key <> 'bad')")
    lost, refused = node.send("nobody", "secret", key=ODD), node.send("order.paid", "secret", key="bad")
    node.deliver_all()
    told = {each.message_id: each for each in of(caplog, "dead")}
    assert set(told) == {lost, refused}
    assert (told[lost].topic, told[lost].key, told[lost].error) == ("nobody", ODD, "no inbox gets this topic")
    assert "no_such_key" in told[refused].error
    for each in told.values():
        assert each.levelname == "ERROR"
        assert str(each.message_id) in done(*words(each.command), dsn=node.dsn)
    assert "secret" not in caplog.text


def test_of_many_dead_letters_the_first_lines_tell_and_the_others_are_counted(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.inbox("shipping")
    with node.connection.transaction():
        for nth in range(TOLD + 5):
            Outbox().send(node.connection, "nobody", nth)
    node.deliver_all()
    *each, rest = of(caplog, "dead")
    assert len({one.message_id for one in each}) == TOLD
    assert rest.getMessage() == ("5 more messages moved to dead_letter. See: mailroom dead-letter list --stage deliver")
    assert done(*words(rest.command), dsn=node.dsn)


def test_executable_that_cannot_be_applied_is_told_without_what_a_function_said(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    function(node, "bad", "BEGIN RAISE 'secret'; END", "void")
    ids = [sent(node, STORE.call, name, {"a": "secret"}, key="k") for name in ("bad", "unknown")]
    totals = execute_all(node.dsn)
    assert totals.dead == 2
    first, second = of(caplog, "dead")
    assert [first.message_id, second.message_id] == ids
    assert (first.topic, first.key, first.error) == ("bad.call", "k", "RaiseException (P0001)")
    assert second.error.startswith("its function is not registered")
    assert "secret" not in caplog.text
    assert str(ids[1]) in done(*words(second.command), dsn=node.dsn)
