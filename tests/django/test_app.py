"""The app `mailroom.django`: migrations that make schema and inboxes, checks, and `manage.py mailroom`."""

import io
import json
import os
import unittest
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper as Sqlite
from django.test import TransactionTestCase, override_settings
from psycopg.conninfo import conninfo_to_dict

from mailroom import schema
from mailroom.django.operations import MailroomSchema
from mailroom.django.place import NodePlace, dsn, place
from mailroom.errors import SchemaError
from mailroom.session.settings import DSN_VARIABLE
from mailroom.testing.django import EmptiesNode
from outbox import Outbox

SHOP = "django migration of shop"


def migrate(*target: str) -> None:
    call_command("migrate", *target, verbosity=0)


def rows(connection: Any, query: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(query)
        found: list[Any] = cursor.fetchall()
    return found


def topics(connection: Any) -> list[str]:
    return [topic for (topic,) in rows(connection, "SELECT topic FROM mailroom.subscription ORDER BY topic")]


# -- Tests that commit ------------------------------------------------------------------------------------------------


class _Commits(EmptiesNode, TransactionTestCase):  # type: ignore[misc]  # Django has no types
    __test__ = False  # the test below runs it, once the node is there

    def test_sends(self) -> None:
        self.addCleanup(self._send)  # a clean-up of the test is before
        self._send()

    def _send(self) -> None:
        with transaction.atomic():
            Outbox().send(connections["default"], "shipping", {"order": 42})


def test_node_is_empty_after_a_test_that_commits(project: Any) -> None:
    migrate()
    result = unittest.TestResult()
    _Commits("test_sends")(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    assert rows(project, "SELECT topic FROM mailroom.outbox") == []
    assert rows(project, "SELECT name FROM mailroom.inbox_registry") == [("shipping",)]


# -- Migrations -------------------------------------------------------------------------------------------------------


def test_migrations_make_schema_inboxes_and_subscriptions_and_undo_them(project: Any) -> None:
    migrate()
    assert schema.current_revision(project) == schema.HEAD
    assert topics(project) == ["order.paid", "order.refunded"]
    assert rows(project, "SELECT name, max_attempts FROM mailroom.inbox_registry") == [("shipping", 3)]
    migrate("shop", "0001")
    assert topics(project) == ["order.paid"]
    migrate("shop", "zero")
    assert rows(project, "SELECT name FROM mailroom.inbox_registry") == []
    assert rows(project, "SELECT action, actor, change FROM mailroom.audit ORDER BY id") == [
        ("migrate", "django migration of mailroom", f"none -> {schema.HEAD}"),
        ("inbox create", SHOP, "order key, max_attempts 16 -> 3, subscribed to order.paid"),
        ("inbox subscribe", SHOP, "order.refunded"),
        ("inbox unsubscribe", SHOP, "order.refunded"),
        ("inbox drop", SHOP, None),
    ]
    migrate("mailroom", "zero")
    assert schema.current_revision(project) is None


def test_migration_backwards_stops_at_messages_and_loses_none(project: Any) -> None:
    migrate()
    with transaction.atomic():
        Outbox().send(project, "shipping", 1)
    call_command("mailroom", "dispatcher", "deliver-all")
    with pytest.raises(SchemaError, match="holds 1 messages"):
        migrate("shop", "zero")
    assert rows(project, "SELECT count(*) FROM mailroom.inbox") == [(1,)]
    with transaction.atomic():
        Outbox().send(project, "nowhere", 1)
    call_command("migrate", "shop", "zero", fake=True, verbosity=0)
    with pytest.raises(SchemaError, match="still hold messages"):
        migrate("mailroom", "zero")
    assert rows(project, "SELECT topic FROM mailroom.outbox") == [("nowhere",)]


def test_schema_that_a_later_release_has_migrated_is_not_taken_back(project: Any) -> None:
    migrate()
    with transaction.atomic(), project.schema_editor() as editor:
        MailroomSchema("0100").database_forwards("mailroom", editor, None, None)
    assert schema.current_revision(project) == schema.HEAD


def test_last_migration_is_that_of_this_release(project: Any) -> None:
    out = io.StringIO()
    call_command("migrate", plan=True, stdout=out)
    assert f"Mailroom: migrate the schema to {schema.HEAD}" in out.getvalue()
    assert "Mailroom: create the inbox shipping" in out.getvalue()
    assert "Mailroom: subscribe the inbox shipping" in out.getvalue()
    last = import_module("mailroom.django.migrations.0001_initial").Migration.operations[-1]
    assert last.revision == schema.HEAD


def test_only_the_node_s_database_gets_a_schema(project: Any) -> None:
    connections.settings["events"] = connections.settings["default"]
    try:
        with override_settings(MAILROOM={"DATABASE": "events"}):
            migrate()
    finally:
        del connections.settings["events"]
    assert schema.current_revision(project) is None


def test_node_may_have_another_schema(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with override_settings(MAILROOM={"SCHEMA": "post"}):
        migrate()
        call_command("mailroom", "inbox", "list")
        with pytest.raises(CommandError):  # workers say themselves which schema
            call_command("mailroom", "worker", "run", "nothing:worker")
        assert "There is no module 'nothing'" in capsys.readouterr().err
    assert schema.current_revision(project, schema="post") == schema.HEAD
    assert schema.current_revision(project) is None


def test_sqlmigrate_prints_no_sql_and_does_nothing(project: Any) -> None:
    out = io.StringIO()
    call_command("sqlmigrate", "shop", "0001", stdout=out)
    assert "CREATE" not in out.getvalue()
    assert "Mailroom: create the inbox shipping" in out.getvalue()
    assert schema.current_revision(project) is None


def test_makemigrations_has_nothing_to_add(project: Any) -> None:
    migrate()
    # It exits with 1 if it has. Of this app only: other tests of the process have models of other ones.
    call_command("makemigrations", "mailroom", check=True, dry_run=True, verbosity=0)


# -- Checks -----------------------------------------------------------------------------------------------------------


def found(databases: list[str] | None = None) -> list[str]:
    return [each.id for each in run_checks(databases=databases) if str(each.id).startswith("mailroom.")]


@pytest.mark.slow
def test_check_tells_of_a_schema_that_is_missing_where_it_may_ask(project: Any) -> None:
    assert found() == []
    [told] = [each for each in run_checks(databases=["default"]) if each.id == "mailroom.W001"]
    assert (told.msg, told.hint) == (
        "There is no Mailroom schema 'mailroom' in this database.", "Run: manage.py migrate mailroom",
    )  # fmt: skip
    migrate()
    assert found(["default"]) == []


def test_check_tells_of_a_database_that_is_down_without_its_password(project: Any) -> None:
    project.close()
    project.settings_dict["PORT"], project.settings_dict["PASSWORD"] = "1", "hunter2"
    [told] = [each for each in run_checks(databases=["default"]) if each.id == "mailroom.W001"]
    assert "could not be looked at: OperationalError" in told.msg
    assert "hunter2" not in str(told)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"DATABASE": "events"}, "DATABASES has no such alias, only default"),
        ({"SCHEMA": "No Name"}, "MAILROOM['SCHEMA'] cannot be used"),
        ({"DSN": "postgresql://"}, 'a dict that may have DATABASE and SCHEMA: {"DATABASE": "default"'),
        ("default", "a dict that may have"),
    ],
)
def test_check_tells_of_a_setting_that_cannot_be_used(project: Any, setting: object, said: str) -> None:
    with override_settings(MAILROOM=setting):
        [told] = [each for each in run_checks() if each.id == "mailroom.E001"]
        assert said in told.msg
        with pytest.raises(ImproperlyConfigured):
            place()
        err = io.StringIO()
        with pytest.raises(CommandError):
            call_command("mailroom", "status", stderr=err)
        assert said in err.getvalue()


def test_check_and_command_tell_of_a_database_that_is_not_postgresql(project: Any, tmp_path: Path) -> None:
    real = connections["default"]
    # In memory none is ever closed.
    other = Sqlite({**connections.settings["default"], "NAME": tmp_path / "other"}, "default")
    connections["default"] = other
    try:
        assert found(["default"]) == ["mailroom.E002"]
        err = io.StringIO()
        with pytest.raises(CommandError):
            call_command("mailroom", "status", stderr=err)
        assert "ENGINE be django.db.backends.postgresql" in err.getvalue()
    finally:
        connections["default"].close()
        connections["default"] = real


# -- manage.py mailroom -----------------------------------------------------------------------------------------------


def test_command_is_mailroom_on_the_database_of_the_settings(
    project: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DSN_VARIABLE, "postgresql://elsewhere.invalid/")
    migrate()
    call_command("mailroom", "inbox", "list", "--json")
    [inbox] = json.loads(capsys.readouterr().out)
    assert inbox["name"] == "shipping"
    assert os.environ[DSN_VARIABLE] == "postgresql://elsewhere.invalid/"
    with pytest.raises(CommandError, match="mailroom inbox drop ended with 1") as ended:
        call_command("mailroom", "inbox", "drop", "nothing")
    assert ended.value.returncode == 1
    assert "There is no inbox 'nothing'" in capsys.readouterr().err


def test_connection_string_has_what_is_libpq_s_of_the_settings(project: Any) -> None:
    node = NodePlace("default", "mailroom")
    project.settings_dict |= {"PASSWORD": "it's a \\ secret", "OPTIONS": {"pool": False, "application_name": "shop"}}
    try:
        told = conninfo_to_dict(dsn(node))
    finally:
        project.settings_dict |= {"PASSWORD": "", "OPTIONS": {}}
    assert (told["password"], told["application_name"]) == ("it's a \\ secret", "shop")
    for option, name in (("host", "HOST"), ("port", "PORT"), ("dbname", "NAME"), ("user", "USER")):
        assert str(told[option]) == str(project.settings_dict[name])
