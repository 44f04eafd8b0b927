"""What all commands share: options, errors, help, and how a call ends."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from mailroom import __version__, schema
from mailroom.cli import root as cli_root
from mailroom.cli.failures import tell
from mailroom.cli.root import root
from mailroom.errors import MailroomError
from mailroom.links.handshake.wire import VERSION
from mailroom.packages import installed as packages
from mailroom.schema import HEAD
from mailroom.session.settings import DSN_VARIABLE
from tests.support.command import done, error_of, json_of, mailroom, process, untold
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually


def commands(command: click.Command = root, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Give the contexts of all commands, groups left out."""
    # With its settings: click keeps the help option that it makes for the first context of a command.
    settings: dict[str, Any] = {**command.context_settings}
    context = click.Context(command, parent=parent, info_name=command.name, **settings)
    if not isinstance(command, click.Group):
        yield context
        return
    for name in command.list_commands(context):
        sub_command = command.get_command(context, name)
        assert sub_command is not None
        yield from commands(sub_command, context)


def test_shared_options_stand_before_or_after_the_sub_command(dsn: str) -> None:
    for arguments in (
        ["--dsn", dsn, "--json", "inbox", "list"],
        ["inbox", "--dsn", dsn, "--json", "list"],
        ["inbox", "list", "--dsn", dsn, "--json"],
        ["--json", "inbox", "list", "--dsn", dsn],
    ):
        result = mailroom(*arguments)
        assert (arguments, result.exit_code, result.stdout) == (arguments, 0, "[]\n")


def test_the_option_that_stands_last_wins(dsn: str) -> None:
    assert "'second'" in error_of(mailroom("--schema", "first", "status", "--schema", "second", dsn=dsn))


def test_version_is_printed_anywhere_with_those_of_schema_and_wire() -> None:
    printed = {mailroom(*where).stdout for where in (["--version"], ["status", "--version"])}
    assert printed == {f"mailroom {__version__} (schema {HEAD}, wire {VERSION})\n"}


@pytest.mark.slow
def test_the_package_runs_as_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mailroom", "nothing-like-it"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("mailroom: error: No such command 'nothing-like-it'. See: mailroom --help")


TYPOS = [
    (["outbx", "send"], 2, "No such command 'outbx'. Did you mean 'outbox'? See: mailroom --help"),
    (["inbox", "crate"], 2, "No such command 'crate'. Did you mean 'create'? See: mailroom inbox --help"),
    (["executor", "target", "lst"], 2, "Did you mean 'list'? See: mailroom executor target --help"),
    (["inbox", "create", "shipping", "--subscibe", "a"], 2, "? See: mailroom inbox create --help"),
    (["grant", "wirter", "shop"], 2, "Did you mean 'writer'? See: mailroom grant --help"),
    (["inbox", "create", "x", "--rate", "ten"], 2, "'--rate': 'ten' is not a valid number. See"),
    (["inbox", "create", "x", "--burst", "ten"], 2, "'--burst': 'ten' is not a valid whole number. See"),
    (["failing"], 2, "No such command 'failing'. Did you mean: mailroom inbox failing? See: mailroom --help"),
    (["trace", "order-42"], 2, "'order-42' is not the id of a message. To find a key: mailroom trace --key order-42"),
    (["inbox", "xyzzy"], 2, "No such command 'xyzzy'. See: mailroom inbox --help"),
]


def test_typo_is_told_what_was_meant() -> None:
    assert untold(TYPOS) == []
    meant = ["Did you mean" in error_of(mailroom(*arguments)) for arguments, _, _ in TYPOS]
    assert meant == [True, True, True, True, True, False, False, True, False, False]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["status"], ["inbox", "list"], ["dispatcher", "deliver-all"]])
def test_closed_stdout_is_no_failure(command: list[str], dsn: str, connect: Connect) -> None:
    Node(dsn, connect(autocommit=True)).inbox("shipping", "orders")
    script = shlex.join([sys.executable, "-m", "mailroom", *command]) + " >&-"
    ran = subprocess.run(["sh", "-c", script], env=os.environ | {DSN_VARIABLE: dsn}, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_no_database_named_is_wrong_usage_with_a_hint() -> None:
    result = mailroom("status")
    assert "MAILROOM_DSN" in error_of(result)
    assert result.exit_code == 2


def test_two_databases_named_are_refused(dsn: str) -> None:
    result = mailroom("status", "--dsn", dsn, "--embedded")
    assert "--embedded" in error_of(result)
    assert result.exit_code == 2


def test_missing_schema_names_the_command(empty_dsn: str) -> None:
    result = mailroom("inbox", "list", "--schema", "shop", dsn=empty_dsn)
    assert "Run: mailroom migrate --schema shop" in error_of(result)
    assert result.exit_code == 1


def test_older_schema_names_the_command(dsn: str, connect: Connect) -> None:
    connect(autocommit=True).execute("UPDATE mailroom.alembic_version SET version_num = '0001'")
    assert "Run: mailroom migrate" in error_of(mailroom("status", dsn=dsn))


@pytest.mark.slow
def test_migrate_makes_brings_up_and_removes_a_schema(empty_dsn: str) -> None:
    assert json_of("migrate", "--schema", "shop", dsn=empty_dsn)["before"] is None
    assert "nothing to do" in done("migrate", "--schema", "shop", dsn=empty_dsn)
    done("outbox", "send", "orders", "--json", "1", "--schema", "shop", dsn=empty_dsn)
    removal = ("migrate", "--schema", "shop", "--revision", "base")
    assert "--discard" in error_of(mailroom(*removal, dsn=empty_dsn))
    assert json_of(*removal, "--discard", dsn=empty_dsn)["after"] is None


def test_unknown_revision_is_told_which_there_are(dsn: str) -> None:
    there_are = f"there are base, head, {schema.HEAD}."
    calls = [
        (("migrate", "--revision", revision), 2, f"There is no revision {revision!r}; {there_are}")
        for revision in ("9999", "9zzz", "01", "+1", "")
    ]
    assert untold(calls, dsn) == []


def test_schema_of_a_release_to_come_is_left_alone(dsn: str, connect: Connect) -> None:
    connect(autocommit=True).execute("UPDATE mailroom.alembic_version SET version_num = '0201'")
    result = mailroom("migrate", dsn=dsn)
    assert "revision 0201, which this release does not know. Run: pip install -U pg-mailroom" in error_of(result)
    assert result.exit_code == 1


BAD = [
    (["status", "--schema", "No"], 2),
    (["inbox", "create", "Shipping"], 2),
    (["inbox", "create", "shipping", "--backoff-s", "nan"], 2),
    (["inbox", "create", "shipping", "--backoff-s", "2", "--backoff-max-s", "1"], 2),
    (["inbox", "peek", "nobody"], 1),
    (["inbox", "reap", "nobody", "--any"], 1),
    (["inbox", "reap", "shipping"], 2),
    (["inbox", "reap", "shipping", "--any", "--limit", "0"], 2),
    (["outbox", "send", "no topic", "--json", "1"], 2),
    (["inbox", "create", "shipping", "--subscribe", "no topic"], 2),
    (["inbox", "peek", "shipping", "--key", "k" * 1_025], 2),
    (["inbox", "reap", "shipping", "--key", ""], 2),
    (["dead-letter", "list", "--inbox", "No"], 2),
    (["dead-letter", "discard", "--all", "--actor", ""], 2),
    (["dead-letter", "discard", "--all", "--why", "x" * 1_001], 2),
    (["outbox", "send", "orders"], 2),
    (["outbox", "send", "orders", "--json", "{"], 2),
    (["outbox", "send", "orders", "--json", "NaN"], 2),
    (["outbox", "send", "orders", "--json", "1", "--key", ""], 2),
    (["outbox", "send", "orders", "--json", "1", "--key-column", "k"], 2),
    (["outbox", "send", "orders", "--csv", "no-such-file"], 2),
    (["dispatcher", "run", "--poll-interval-s", "0"], 2),
    (["trace", "4711"], 2),
    (["nothing-like-it"], 2),
]


def test_bad_input_is_told_in_one_line(dsn: str) -> None:
    assert untold([(arguments, code, "") for arguments, code in BAD], dsn) == []


WITH_PASSWORDS = [
    ["status", "--dsn", "postgresql://me:hush@127.0.0.1:1/shop"],
    ["status", "--dsn", "postgresql://me:hu@hush@127.0.0.1:1/shop"],
    ["status", "--dsn", "postgresql://me:hush/hush@127.0.0.1:1/shop"],
    ["status", "--dsn", "postgresql://me:hush?hush@127.0.0.1:1/shop"],
    ["status", "--dsn", "postgresql+psycopg://me:hush@127.0.0.1:1/shop"],
    ["status", "--dsn", "host=127.0.0.1 port=1 password=hush"],
    ["status", "--dsn", "host=127.0.0.1 password=hush hush"],
    ["status", "--dsn", "hush"],
    ["status", "postgresql://me:hush@127.0.0.1/shop"],
    ["status", "host=127.0.0.1 password='hush hush'"],
    ["status", "--schema", "postgresql://me:hush@127.0.0.1/shop"],
    ["postgresql://me:hush@127.0.0.1/shop"],
]


def test_password_is_never_printed() -> None:
    for arguments in WITH_PASSWORDS:
        result = mailroom(*arguments)
        assert "hush" not in error_of(result) + result.stdout


def test_wrong_password_is_told_without_it(dsn: str) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(dsn) | {"password": "hush-hush"}
    wrong = psycopg.conninfo.make_conninfo("", **parts)
    result = mailroom("status", dsn=wrong)
    assert "password authentication failed" in error_of(result)
    assert "hush" not in result.output


def test_error_of_the_database_does_not_repeat_the_row(
    dsn: str, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(psycopg.errors.NotNullViolation) as caught:
        connect().execute("""INSERT INTO mailroom.outbox (topic, value_json) VALUES (NULL, '"hush"')""")
    assert "hush" in str(caught.value)
    assert tell(caught.value) == 1
    line = capsys.readouterr().err
    assert "topic" in line
    assert "hush" not in line


@pytest.mark.parametrize(
    ("granted", "arguments", "told"),
    [
        ((), ["status"], "for schema mailroom (42501). User {} lacks USAGE or CREATE on this schema"),
        ((), ["migrate"], "for schema mailroom (42501). User {} lacks USAGE or CREATE on this schema"),
        ((), ["migrate", "--schema", "shop"], "for database {database} (42501). User {} lacks CREATE on this database"),
        (("USAGE ON SCHEMA mailroom",), ["status"], "alembic_version (42501). User {} lacks a grant on this table"),
        (("USAGE ON SCHEMA mailroom",), ["dispatcher", "deliver-all"], "alembic_version (42501). User {} lacks"),
    ],
)  # fmt: skip
def test_missing_grant_is_told_with_who_lacks_it(
    dsn: str, connect: Connect, granted: tuple[str, ...], arguments: list[str], told: str
) -> None:
    connection = connect(autocommit=True)
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    role = f"nobody_{parts['dbname']}"
    connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'hush'")
    try:
        for grant in granted:
            connection.execute(f"GRANT {grant} TO {role}")
        given = psycopg.conninfo.make_conninfo("", **parts | {"user": role, "password": "hush"})
        result = mailroom(*arguments, dsn=given)
        # A user that only libpq's environment names is told as well.
        nameless = psycopg.conninfo.make_conninfo(
            "", **{k: v for k, v in parts.items() if k not in ("user", "password")}
        )
        again = mailroom(*arguments, dsn=nameless, PGUSER=role, PGPASSWORD="hush")
    finally:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert (result.exit_code, again.stderr) == (1, result.stderr)
    assert told.format(role, database=parts["dbname"]) in error_of(result)
    assert "s the role that ran `mailroom migrate`" in result.stderr


def test_error_of_several_lines_is_told_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(MailroomError("It broke:\n  here\x1b[31m", code="MR-inbox-in-use")) == 1
    assert capsys.readouterr().err == "mailroom: error: It broke: here\\x1b[31m [MR-inbox-in-use]\n"


def test_unexpected_error_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        tell(ZeroDivisionError())


def test_what_steers_a_terminal_is_escaped(dsn: str) -> None:
    assert "\x1b" not in mailroom("inbox", "peek", "\x1b[31m", dsn=dsn).output


@pytest.mark.slow
def test_command_that_cannot_be_imported_leaves_the_others_usable(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    known = {
        "ghost": EntryPoint("ghost", "no_such_package.cli:ghost", cli_root.GROUP),
        "status": EntryPoint("status", "mailroom.cli.commands.status:status", cli_root.GROUP),
    }
    monkeypatch.setattr(root, "_entry_points", lambda: known)
    assert "(not available here)" in done("--help", dsn=dsn)
    done("status", dsn=dsn)
    assert "no_such_package" in error_of(mailroom("ghost", "--any", "thing", dsn=dsn))
    twice = (*known.values(), EntryPoint("status", "other.cli:status", cli_root.GROUP))
    monkeypatch.setattr(cli_root, "declared", lambda _group: twice)
    assert "status is declared by mailroom (mailroom.cli" in error_of(mailroom("status", dsn=dsn))


def test_command_of_an_extra_says_which(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    known = {name: each for name, each in root._entry_points().items() if name != "bench"}
    monkeypatch.setattr(root, "_entry_points", lambda: known)
    assert "bench" not in done("--help", dsn=dsn)
    assert error_of(mailroom("bench", "--only", "cost", dsn=dsn)) == (
        "`mailroom bench` is not installed. Run: pip install 'pg-mailroom[bench]'"
    )


def test_list_of_commands_has_the_first_sentence_of_each() -> None:
    context = click.Context(root)
    texts = {name: root.get_command(context, name) for name in root.list_commands(context)}
    assert {name: each.get_short_help_str(1_000) for name, each in texts.items() if each} == cli_root.ABOUT


def test_what_distributions_declare_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def asking(*, group: str) -> EntryPoints:
        asked.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(packages, "entry_points", asking)
    assert "status" in mailroom("--help").stdout
    assert "--json" in mailroom("status", "--help").stdout
    assert asked in ([], [cli_root.GROUP])  # none if another test has asked before


@pytest.mark.slow
def test_commands_are_imported_only_when_asked_for(dsn: str) -> None:
    modules = "m for m in ('outbox', 'inbox', 'dispatcher', 'mailroom_bench', 'examples', 'alembic', 'sqlalchemy')"
    script = (
        "import sys; from mailroom.cli.root import root\n"
        "for arguments in (['--help'], ['status', '--json']):\n"
        "    try: root(arguments)\n"
        f"    except SystemExit as end: sys.stderr.write(str([end.code, *({modules} if m in sys.modules)]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, DSN_VARIABLE: dsn},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == "[0][0]"


def test_help_of_every_command_teaches_by_example() -> None:
    for context in commands():
        text = context.get_help()
        assert "(not available here)" not in text, context.command_path
        assert "Example" in text or context.command_path.split()[-1] in ("bench", "demo"), context.command_path


def test_every_command_takes_the_shared_options_once() -> None:
    for context in commands():
        names = [name for option in context.command.params for name in option.opts]
        for shared in ("--dsn", "--schema", "--embedded", "--json", "--version"):
            assert names.count(shared) == 1, f"{context.command_path} {shared}"


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_one_line_and_takes_nothing(dsn: str, connect: Connect) -> None:
    node = Node(dsn, connect(autocommit=True))
    node.inbox("shipping", "orders")
    node.send("orders", 1, key="k")
    node.deliver_all()
    holder = connect()
    holder.execute("SELECT FROM mailroom.inbox_shipping FOR UPDATE")
    call = process("inbox", "reap", "shipping", "--key", "k", dsn=dsn)
    eventually(lambda: node.sessions("mailroom inbox reap", "wait_event_type = 'Lock'"))
    call.send_signal(signal.SIGINT)
    _, error = call.communicate(timeout=WITHIN_S)
    assert (call.returncode, error) == (130, "mailroom: interrupted\n")
    assert len(node.delivered()) == 1


@pytest.mark.slow
def test_embedded_server_is_started_for_the_command_and_stopped_after_it(server_home: Path) -> None:
    home = str(server_home)
    assert "Run: mailroom migrate" in error_of(mailroom("--embedded", "status", MAILROOM_HOME=home))
    assert mailroom("migrate", "--embedded", MAILROOM_HOME=home).exit_code == 0
    assert mailroom("status", "--embedded", "--json", MAILROOM_HOME=home).exit_code == 0
    assert not list(server_home.glob("*/data/postmaster.pid"))


def test_a_percent_encoded_password_is_taken(dsn: str) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    encoded = "".join(f"%{byte:02X}" for byte in str(parts["password"]).encode())
    again = f"postgresql://{parts['user']}:{encoded}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    done("status", "--dsn", again, dsn="host=nowhere.invalid")
