"""Canaries: a password and a payload that are easy to find, and nowhere to be found in what people and logs get to see.

On purpose they are in two places: the payload in the message's own row, and what a handler's exception says in
`key_state.last_error`, `attempt.error` and `dead_letter.reason`.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dispatcher import Dispatcher, deliver_all
from inbox import (
    AsyncInbox,
    AsyncWorker,
    Handlers,
    Inbox,
    Message,
    Park,
    Reject,
    Retry,
    Skip,
    Unavailable,
    Worker,
)
from mailroom import Topic
from mailroom.errors import ConfigurationError, ConnectionFailed, MailroomError
from mailroom.session import settings
from mailroom.testing import deliver as deliver_here
from outbox import AsyncOutbox, Outbox, Outgoing
from tests.support.command import done, mailroom
from tests.support.databases import Connect
from tests.support.drivers import opened
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, working

pytestmark = pytest.mark.inbox("shipping", backoff_s=0)

ROOT = Path(__file__).parents[1]
CANARY = "kanarienvogel"
# In several pieces, since each of these characters has ended a password early somewhere.
PASSWORD = f"{CANARY}%?{CANARY}^]@{CANARY}/{CANARY}"
VALUE = {"card": CANARY, "bytes": CANARY.encode()}
HEADERS = {"note": CANARY}

# How it may be written where only a reader who knows what to look for would notice.
WRITTEN = (CANARY, CANARY.encode().hex(), quote(PASSWORD, safe=""))


def shows_nothing(text: str) -> bool:
    """Tell whether the canary is not in the text, in any of the forms it takes."""
    return not any(form.lower() in text.lower() for form in WRITTEN)


def all_of(error: BaseException) -> str:
    """Return what a log or report shows of an error: with its causes, as far as they are not suppressed."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return all that was logged by any logger, at any level, with tracebacks."""
    caplog.set_level(logging.DEBUG)
    formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
    return lambda: "\n".join(formatter.format(record) + repr(record.args) for record in caplog.records)


# -- The password -----------------------------------------------------------------------------------------------------


def url_with(dsn: str, password: str, **parts: str) -> str:
    known = conninfo_to_dict(dsn) | parts
    return f"postgresql://{known['user']}:{password}@{known['host']}:{known['port']}/{known['dbname']}"


def no_handler(_message: Message, _connection: Any) -> None: ...


async def no_async_handler(_message: Message, _connection: Any) -> None: ...


LOG_IN: dict[str, Callable[[str], object]] = {
    "settings": lambda dsn: settings.connect(settings.dsn(dsn), "test"),
    "engine": lambda dsn: settings.engine(dsn).connect(),
    "deliver_all": deliver_all,
    "Dispatcher": lambda dsn: asyncio.run(Dispatcher(dsn).run()),
    "Worker": lambda dsn: Worker(dsn, "shipping", no_handler, fatal=(ConnectionFailed,)).run(),
    "AsyncWorker": lambda dsn: asyncio.run(
        AsyncWorker(dsn, "shipping", no_async_handler, fatal=(ConnectionFailed,)).run()
    ),
}
REFUSED: dict[str, Callable[[str], str]] = {
    "URL": lambda dsn: url_with(dsn, quote(PASSWORD, safe="")),
    "key=value": lambda dsn: make_conninfo("", **(conninfo_to_dict(dsn) | {"password": PASSWORD})),
    "no server": lambda dsn: url_with(dsn, quote(PASSWORD, safe=""), port="1"),
    "no host": lambda dsn: url_with(dsn, quote(PASSWORD, safe=""), host="no-such-host.invalid"),
    "no database": lambda dsn: make_conninfo("", **(conninfo_to_dict(dsn) | {"dbname": "none", "password": PASSWORD})),
}
MALFORMED = {
    "raw": f"postgresql://me:{PASSWORD}@127.0.0.1:1/shop",
    "raw %": f"postgresql://me:{CANARY}%@127.0.0.1:1/shop",
    "raw ?": f"postgresql://me:{CANARY}?{CANARY}@127.0.0.1:1/shop",
    "raw ^": f"postgresql://me:{CANARY}^{CANARY}@127.0.0.1:one/shop",
    "raw ]": f"postgresql://me:[{CANARY}]{CANARY}@127.0.0.1:1/shop",
    "raw @": f"postgresql://me:{CANARY}@{CANARY}@127.0.0.1:1/shop",
    "raw /": f"postgresql://me:{CANARY}/{CANARY}@127.0.0.1:1/shop",
    "blank": f"host=127.0.0.1 password={CANARY} {CANARY}",
    "quote": f"host=127.0.0.1 password='{CANARY}",
    "unknown word": f"{CANARY}=1",
    "word": CANARY,
    "parameter": f"postgresql://me@127.0.0.1:1/shop?pass={CANARY}",
}


@pytest.mark.slow
@pytest.mark.parametrize("who", LOG_IN)
def test_login_that_fails_shows_no_password(dsn: str, who: str, logged: Callable[[], str]) -> None:
    for how, refused in REFUSED.items():
        with pytest.raises((ConnectionFailed, MailroomError)) as caught:
            LOG_IN[who](refused(dsn))
        assert shows_nothing(all_of(caught.value) + logged()), how


def test_listen_dsn_that_cannot_be_read_is_not_repeated() -> None:
    for how in sorted(MALFORMED.keys() - {"raw ]", "raw ^"}):  # which are wrong only when used
        with pytest.raises(ConfigurationError) as caught:
            Worker("postgresql://me@127.0.0.1/shop", "shipping", no_handler, listen_dsn=MALFORMED[how])
        assert shows_nothing(all_of(caught.value)), how


def test_connection_string_that_cannot_be_read_is_not_repeated(logged: Callable[[], str]) -> None:
    for who, how in product(LOG_IN, MALFORMED):
        with pytest.raises((ConfigurationError, ConnectionFailed)) as caught:
            LOG_IN[who](MALFORMED[how])
        assert shows_nothing(all_of(caught.value)), (who, how)
    assert shows_nothing(logged())


@pytest.fixture
def login(dsn: str, connect: Connect) -> Iterator[str]:
    """The test's database as a role whose password is the canary, and right."""
    role = f"canary_{uuid4().hex}"
    server = connect(autocommit=True)
    server.execute(
        psycopg.sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(psycopg.sql.Identifier(role), PASSWORD)
    )
    try:
        yield url_with(dsn, quote(PASSWORD, safe=""), user=role)
    finally:
        server.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_password_with_every_awkward_character_logs_in_and_is_not_logged(
    login: str, node: Node, logged: Callable[[], str]
) -> None:
    handled: list[Message] = []
    send_canary(node)
    deliver_all(login)
    with working(
        Worker(login, "shipping", lambda message, _: handled.append(message), dispatch=True, poll_interval_s=NEVER_S)
    ):
        eventually(lambda: handled)
        eventually(lambda: "leading" in logged())
        assert shows_nothing(sessions(node))
    assert shows_nothing(logged())


def sessions(node: Node) -> str:
    """Return what anybody who may look at the server sees of the sessions of this database."""
    seen = "SELECT query, application_name, usename FROM pg_stat_activity WHERE query !~ 'CREATE ROLE'"
    return repr(node.rows(f"{seen} AND datname = current_database()"))


COMMANDS = (
    ("status",),
    ("migrate",),
    ("inbox", "list"),
    ("inbox", "reap", "shipping", "--any"),
    ("outbox", "send", "t", "--json", "1"),
    ("dispatcher", "run"),
    ("dispatcher", "deliver-all"),
    ("trace", str(UUID(int=1))),
)


@pytest.mark.slow
def test_command_that_cannot_log_in_shows_no_password(dsn: str) -> None:
    for command, wrong in product(COMMANDS, (MALFORMED["raw"], REFUSED["URL"](dsn))):
        for result in (mailroom(*command, dsn=wrong), mailroom(*command, "--dsn", wrong)):
            assert result.exit_code in (1, 2), command
            assert shows_nothing(result.output + result.stderr + all_of(result.exception or Exception())), command


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("given", ["argument", "environment"])
@pytest.mark.parametrize("how", ["raw", "URL"])
def test_alembic_that_cannot_log_in_shows_no_password(dsn: str, how: str, given: str) -> None:
    wrong = MALFORMED["raw"] if how == "raw" else REFUSED["URL"](dsn)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "MAILROOM"))}
    arguments = ["-x", f"dsn={wrong}"] if given == "argument" else []
    ended = subprocess.run(
        [sys.executable, "-m", "alembic.config", *arguments, "upgrade", "head"],
        cwd=ROOT, env=environment | ({} if arguments else {"MAILROOM_DSN": wrong}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "Traceback" in ended.stderr  # alembic's own way of telling
    assert shows_nothing(ended.stdout + ended.stderr)


# -- The payload ------------------------------------------------------------------------------------------------------


def send_canary(node: Node, **fields: Any) -> None:
    node.send("shipping", VALUE, headers=HEADERS, **fields)


def test_what_is_printed_of_an_object_shows_no_payload(node: Node) -> None:
    send_canary(node)
    node.deliver_all()
    [message] = Inbox("shipping").peek(node.connection)
    assert message.value == VALUE
    printed = [
        message,
        Outgoing("shipping", VALUE, headers=HEADERS),
        *(Outbox(), AsyncOutbox(), Inbox("shipping"), AsyncInbox("shipping")),
        Worker(REFUSED["URL"](node.dsn), "shipping", no_handler),
        AsyncWorker(REFUSED["URL"](node.dsn), "shipping", no_async_handler),
        Dispatcher(REFUSED["URL"](node.dsn)),
    ]
    assert shows_nothing(f"{printed!r} {[str(each) for each in printed]}")


class Broken(Exception):
    """A handler's error, as careless as they are."""


def careless(message: Message, _connection: Any) -> None:
    raise Broken(f"cannot handle {message.value} with {dict(message.headers)}")


def aborting(_message: Message, connection: Any) -> None:
    connection.execute("SELECT %s::int", [CANARY])


def told(verdict: type[Park | Retry | Skip]) -> Callable[[Message, Any], None]:
    def handle(_message: Message, _connection: Any) -> None:
        raise verdict(reason=CANARY) if verdict is not Retry else Retry(0, CANARY)

    return handle


HANDLERS = {"exception": careless, "database": aborting, "park": told(Park), "skip": told(Skip), "retry": told(Retry)}


@pytest.mark.slow
def test_handler_that_fails_is_logged_without_what_it_says(node: Node, logged: Callable[[], str]) -> None:
    """First in a batch with others, and then, as a failing key, alone."""
    for key in HANDLERS:
        send_canary(node, key=key)
    node.deliver_all()

    def handle(message: Message, connection: Any) -> None:
        HANDLERS[message.key](message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: node.delivered() == [])
        assert shows_nothing(sessions(node))
    assert {key for (key,) in node.rows("SELECT key FROM mailroom.attempt")} == set(HANDLERS)
    assert "failed" in logged()
    assert shows_nothing(logged())
    # It stays where its author can find it, beside the message.
    assert CANARY in repr(node.rows("SELECT error FROM mailroom.attempt"))


@dataclass
class Card:
    """What the value of these tests does not fit."""

    card: int


def rejecting(_message: Message, _connection: Any) -> None:
    raise Reject(VALUE)


def down(_message: Message, _connection: Any) -> None:
    raise Unavailable(CANARY, after_s=0)


def no_answer(_message: Message, _connection: Any) -> object:
    return {**VALUE, "bad": object()}


def swallowing(message: Message, connection: Any) -> None:
    with contextlib.suppress(psycopg.Error):
        aborting(message, connection)


OUTCOMES = {
    "exception": (careless, 500, {"error": "Broken"}),
    "database": (aborting, 500, {"error": "InvalidTextRepresentation"}),
    "skip": (told(Skip), 500, {"error": "Skip"}),
    "no answer": (no_answer, 500, {"error": "EncodeError"}),
    "swallowed": (swallowing, 500, {"error": "HandlerFailed"}),
    "rejected": (rejecting, 400, VALUE),  # the value is for the sender
}


@pytest.mark.inbox("shipping", on_failure="skip", max_attempts=1)
@pytest.mark.inbox("answers")
def test_command_that_is_not_done_shows_nothing_in_logs_and_answers(node: Node, logged: Callable[[], str]) -> None:
    for outcome in OUTCOMES:
        node.send("shipping", VALUE, key=outcome, kind="C", headers=HEADERS | {"reply_to": "answers"})
        node.send("shipping", VALUE, key=outcome, kind="C", headers=HEADERS)
    node.deliver_all()
    handlers = Handlers()

    @handlers.on("shipping")
    def handle(message: Message, connection: Any) -> object:
        return OUTCOMES[message.key][0](message, connection)

    with working(Worker(node.dsn, "shipping", handlers, poll_interval_s=NEVER_S)):
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.inbox_shipping") == 0)
    assert shows_nothing(logged())
    node.deliver_all()
    answers = Inbox("answers").peek(node.connection)
    assert len(answers) == len(OUTCOMES)
    assert {answer.key: (answer.status, answer.value) for answer in answers} == {
        outcome: (status, value) for outcome, (_, status, value) in OUTCOMES.items()
    }
    assert shows_nothing(repr([dict(answer.headers) for answer in answers]))
    rejected = node.rows("SELECT error FROM mailroom.attempt WHERE key = 'rejected'")
    assert shows_nothing(repr(rejected) + repr([row for row in node.dead() if row[0] == "rejected"]))


def test_what_is_down_is_logged_without_what_is_said_of_it(node: Node, logged: Callable[[], str]) -> None:
    send_canary(node, key="a")
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", down, poll_interval_s=NEVER_S)):
        eventually(lambda: "Unavailable" in logged())
    assert shows_nothing(logged())


def test_errors_of_handlers_show_nothing(node: Node) -> None:
    node.send("shipping", VALUE, key="a", kind="C", headers=HEADERS | {"reply_to": "answers"})
    node.deliver_all()
    [command] = Inbox("shipping").peek(node.connection)
    typed, by_hand, none = Handlers(), Handlers(), Handlers()
    typed.on(Topic("shipping", Card))(lambda _message, _connection: None)
    by_hand.on("shipping")(lambda message, connection: Outbox().reply(connection, message, VALUE))
    for handlers in (typed, by_hand, none):
        with node.connection.transaction(force_rollback=True), pytest.raises(MailroomError) as caught:
            handlers(command, node.connection)
        assert shows_nothing(all_of(caught.value))


def test_value_that_cannot_be_decoded_is_logged_without_it(node: Node, logged: Callable[[], str]) -> None:
    raw = b"\x82\x6d" + CANARY.encode() + b"\xc2\x6d" + CANARY.encode()
    with node.connection.transaction():
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, key, value) VALUES ('shipping', 'a', %s)", [raw], binary=True
        )
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", lambda message, _: message.value, poll_interval_s=NEVER_S)):
        eventually(lambda: node.delivered() == [])
    assert shows_nothing(logged() + repr(node.rows("SELECT error FROM mailroom.attempt")))


def test_message_that_the_database_refuses_is_logged_and_kept_without_its_payload_in_the_reason(
    node: Node, logged: Callable[[], str]
) -> None:
    node.connection.execute("ALTER TABLE mailroom.inbox_shipping ADD CHECK (key <> 'bad')")
    send_canary(node, key="bad")
    node.deliver_all()
    [(_, _, reason)] = node.dead()
    assert "23514" in reason
    assert shows_nothing(reason + logged())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind", ["psycopg", "Connection psycopg", "Session psycopg", "Connection pg8000", "Session pg8000"]
)
def test_what_others_see_of_a_session_shows_no_payload(node: Node, kind: str) -> None:
    with opened(node.dsn, kind) as connection:
        outbox, shipping = Outbox(), Inbox("shipping")
        for step in (
            lambda: outbox.send(connection, "shipping", VALUE, key="a", headers=HEADERS),
            lambda: outbox.send_many(connection, [Outgoing("shipping", VALUE, headers=HEADERS)] * 3),
            lambda: deliver_here(connection),
            lambda: shipping.peek(connection),
            lambda: shipping.reap(connection, "a"),
            lambda: shipping.reap_any(connection),
        ):
            step()
            seen = sessions(node)
            assert "mailroom" in seen
            assert shows_nothing(seen)


def test_message_that_is_refused_is_refused_without_its_payload(node: Node) -> None:
    refused: list[dict[str, Any]] = [
        {"value": {**VALUE, "bad": object()}},
        {"value": {CANARY + " is not a name": {1}}},
        {"value": [CANARY + "\ud800"]},
        {"value": VALUE, "headers": {**HEADERS, "x": 1}},
        {"value": VALUE, "headers": HEADERS, "key": ""},
        {"value": VALUE, "headers": HEADERS, "after_clock": -1},
        {"value": VALUE, "headers": {**HEADERS, "long": "x" * 9_000}},
    ]
    calls: list[Callable[[dict[str, Any]], object]] = [
        lambda bad: Outbox().send_many(node.connection, [Outgoing("t", **bad)]),
        lambda bad: Outbox().send(node.connection, "t", **bad),
    ]
    for (nth, bad), call in product(enumerate(refused), calls):
        with pytest.raises(MailroomError) as caught:
            call(bad)
        assert shows_nothing(all_of(caught.value)), nth


def test_command_that_fails_shows_no_payload(dsn: str) -> None:
    for arguments in (
        ("outbox", "send", "no topic", "--json", f'{{"card": "{CANARY}"}}'),
        ("outbox", "send", "t", "--json", f'{{"card": "{CANARY}"'),
        ("outbox", "send", "t", "--json", f'{{"card": "{CANARY}", "n": NaN}}'),
        ("outbox", "send", "t", "--json", f'{{"card": "{CANARY}", "n": {2**70}}}'),
        ("outbox", "send", "t", "--json", f'{{"card": "{CANARY}"}}', "--key", ""),
        ("outbox", "send", "t", "--json", f'{{"card": "{CANARY}"}}', "--schema", "none"),
    ):
        result = mailroom(*arguments, dsn=dsn)
        assert result.exit_code in (1, 2), arguments
        assert shows_nothing(result.output + result.stderr), arguments


def test_rows_of_a_file_that_are_refused_are_not_repeated(dsn: str, tmp_path: Path) -> None:
    for nth, content in enumerate((f"a,b\n1,{CANARY}\n2,{CANARY},3\n", f"a,b\n{'k' * 1_025},{CANARY}\n")):
        file = tmp_path / f"{nth}.csv"
        file.write_text(content)
        result = mailroom("outbox", "send", "t", "--csv", str(file), "--key-column", "a", dsn=dsn)
        assert result.exit_code == 1
        assert shows_nothing(result.output + result.stderr)


def test_status_and_trace_show_no_payload(node: Node) -> None:
    [message_id] = [node.send("shipping", VALUE, headers=HEADERS)]
    node.deliver_all()
    shown = done("status", dsn=node.dsn) + done("status", "--json", dsn=node.dsn)
    shown += done("trace", str(message_id), dsn=node.dsn) + done("trace", str(message_id), "--json", dsn=node.dsn)
    assert shows_nothing(shown)
