"""`grant` and `revoke`, in Python and from a shell, and what a missing right says."""

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from dispatcher import Dispatcher
from inbox import Worker
from mailroom import create_inbox
from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName, MailroomError, UnknownInbox
from mailroom.roles import RightsChange, grant, grant_async, revoke
from mailroom.roles.advice import COMMANDS, purpose_of
from mailroom.roles.matrix import PURPOSES
from mailroom.schema.migration import _becoming_owner, migrate
from tests.roles.test_matrix import may, of_matrix
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import Node
from tests.support.roles import rights, role

ME: dict[str, Any] = {"actor": "ada"}


pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.inbox("billing"), pytest.mark.inbox("ledger", order="total")]


@pytest.fixture
def shop(node: Node) -> Iterator[str]:
    """A role without rights, whose name has all that a name may have."""
    name = f'{conninfo_to_dict(node.dsn)["dbname"]} "100%" :x'[-63:]
    node.connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    yield name
    node.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def given(node: Node, purpose: str, name: str, *inboxes: str, **more: Any) -> RightsChange:
    with node.connection.transaction():
        return grant(node.connection, purpose, name, inboxes=inboxes or None, **ME | more)


def taken(node: Node, purpose: str, name: str, *inboxes: str, **more: Any) -> RightsChange:
    with node.connection.transaction():
        return revoke(node.connection, purpose, name, inboxes=inboxes or None, **ME | more)


@pytest.mark.slow
def test_each_purpose_is_granted_once_or_again_and_revoked_without_a_trace(node: Node, shop: str) -> None:
    none = may(node, shop)
    for purpose, about in PURPOSES.items():
        inboxes = ("shipping", "ledger") if about.inboxes == "named" else ()
        change = given(node, purpose, shop, *inboxes)
        assert change.inboxes == (inboxes or (() if about.inboxes == "none" else ("billing", "ledger", "shipping")))
        found = may(node, shop)
        assert {atom for atom in of_matrix(purpose) if atom not in found} == set()
        given(node, purpose, shop, *inboxes)
        assert may(node, shop) == found
        assert taken(node, purpose, shop, *inboxes).kept == ()
        assert may(node, shop) == none, purpose


# What is granted, what of it is revoked, and whose rights are kept.
REVOKED: list[tuple[list[tuple[str, ...]], tuple[str, ...], list[str]]] = [
    ([("writer",), ("reaper", "shipping")], ("writer",), ["reaper"]),
    ([("writer",), ("reaper", "shipping")], ("reaper", "shipping"), ["writer"]),
    ([("reaper", "shipping", "ledger")], ("reaper", "ledger"), ["reaper"]),
    ([("reaper", "shipping"), ("operator", "shipping")], ("operator", "shipping"), ["reaper"]),
    ([("dispatcher",), ("writer",)], ("dispatcher",), ["writer"]),  # a table's right is taken, a column's stays
    ([("dispatcher",), ("writer",)], ("writer",), ["dispatcher"]),
    ([("auditor",), ("spark-writer",), ("link-reader",)], ("auditor",), ["link-reader", "spark-writer"]),
]


@pytest.mark.slow
def test_revoke_keeps_what_other_purposes_need(node: Node) -> None:
    for granted, revoked, kept in REVOKED:
        rest = [each for each in granted if each != revoked]
        if revoked == ("reaper", "ledger"):
            rest = [("reaper", "shipping")]
        with role(node.dsn) as (name, _):
            for each in rest:
                given(node, *each[:1], name, *each[1:])
            expected = may(node, name)
            for each in granted:
                given(node, *each[:1], name, *each[1:])
            assert sorted(taken(node, *revoked[:1], name, *revoked[1:]).kept) == kept
            assert may(node, name) == expected, (granted, revoked)


def test_inbox_that_comes_later_needs_another_grant_and_keeps_the_purpose(node: Node, shop: str) -> None:
    given(node, "operator", shop)
    given(node, "dispatcher", shop)
    node.inbox("late")
    readable = "SELECT has_table_privilege(%s, 'mailroom.inbox_late', 'DELETE')"
    assert not node.value(readable, shop)
    assert "dispatcher" in taken(node, "operator", shop).kept
    given(node, "dispatcher", shop)
    assert node.value(readable, shop)


def test_what_others_make_belongs_to_the_owner_of_the_schema(node: Node, shop: str) -> None:
    """Others are members of its role, who have not said SET ROLE, and superusers."""
    may_migrate = f'GRANT CREATE ON DATABASE "{node.connection.info.dbname}" TO {{role}}'
    with (
        role(node.dsn, may_migrate, owns="mailroom") as (owner, dsn),
        role(node.dsn, f"GRANT {owner} TO {{role}}") as (_, of_member),
    ):
        node.inbox("superuser_s")
        with psycopg.connect(of_member) as member:
            create_inbox(member, "member_s", order="total")
            before = member.execute("SELECT current_user").fetchone()
            migrate(member)
            assert member.execute("SELECT current_user").fetchone() == before
            member.execute(_becoming_owner("mailroom").encode())
            assert member.execute("SELECT current_user").fetchone() == (owner,)
        with psycopg.connect(dsn) as connection:
            grant(connection, "reaper", shop, inboxes=["member_s", "superuser_s"], actor="ada")
        owners = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relispartition AND relname ^@ 'inbox_'"
        assert node.rows(owners) == [(owner,)]


def test_grants_are_audited(node: Node, shop: str) -> None:
    given(node, "writer", shop, why="a shop")
    given(node, "reaper", shop, "shipping", "billing")
    taken(node, "reaper", shop, "billing", dry_run=True)
    taken(node, "writer", shop)
    assert node.rows("SELECT actor, action, inbox, change, reason FROM mailroom.audit ORDER BY id") == [
        ("ada", "grant", None, f"writer to {shop}", "a shop"),
        ("ada", "grant", "shipping", f"reaper to {shop}", None),
        ("ada", "grant", "billing", f"reaper to {shop}", None),
        ("ada", "revoke", None, f"writer from {shop}", None),
    ]


def test_what_cannot_be_granted_is_refused(node: Node, shop: str) -> None:
    before = may(node, shop)
    [(owner,)] = node.rows("SELECT current_user")
    for purpose, name, inboxes, error, code in (
        ("boss", shop, (), ConfigurationError, "MR-invalid-argument"),
        ("reaper", shop, (), ConfigurationError, "MR-invalid-argument"),
        ("writer", shop, ("shipping",), ConfigurationError, "MR-invalid-argument"),
        ("dispatcher", shop, ("shipping",), ConfigurationError, "MR-invalid-argument"),
        ("reaper", shop, ("nowhere",), UnknownInbox, "MR-unknown-inbox"),
        ("writer", "public", (), ConfigurationError, "MR-role-unfit"),
        ("writer", "PUBLIC", (), ConfigurationError, "MR-role-unfit"),
        ("writer", owner, (), ConfigurationError, "MR-role-unfit"),
        ("writer", "no such role", (), ConfigurationError, "MR-no-such-role"),
        ("writer", "", (), InvalidName, "MR-invalid-name"),
        ("writer", "x" * 64, (), InvalidName, "MR-invalid-name"),
    ):
        for change in (given, taken):
            with pytest.raises(MailroomError) as refused:
                change(node, purpose, name, *inboxes)
            assert (type(refused.value), refused.value.code) == (error, code)
    with pytest.raises(ConfigurationError, match="staging"):
        given(node, "writer", shop, staging_schema="landing")
    with pytest.raises(ConfigurationError, match="list of names"):
        grant(node.connection, "reaper", shop, inboxes="shipping", **ME)
    with pytest.raises(InvalidMessage):
        given(node, "writer", shop, actor="")
    assert may(node, shop) == before


def test_staging_schema_is_granted_and_revoked_beside_the_node_s(node: Node, shop: str) -> None:
    node.connection.execute("CREATE SCHEMA landing")
    rights = "SELECT has_schema_privilege(%s, %s, 'CREATE'), has_schema_privilege(%s, %s, 'USAGE')"
    given(node, "spark-writer", shop, staging_schema="landing")
    assert node.rows(rights, shop, "landing", shop, "landing") == [(True, True)]
    assert node.rows(rights, shop, "mailroom", shop, "mailroom") == [(False, True)]
    taken(node, "spark-writer", shop, staging_schema="landing")
    assert node.rows(rights, shop, "landing", shop, "landing") == [(False, False)]


async def test_async_grant_does_the_same(node: Node, shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        made = await grant_async(connection, "reaper", shop, inboxes=["shipping"], **ME)
    assert made == given(node, "reaper", shop, "shipping")


# -- From a shell -----------------------------------------------------------------------------------------------------


def test_command_grants_prints_and_revokes(node: Node, shop: str) -> None:
    none = may(node, shop)
    printed = done("grant", "reaper", shop, "--inbox", "shipping", "--print", dsn=node.dsn)
    assert may(node, shop) == none
    told = done("grant", "reaper", shop, "--inbox", "shipping", "--why", "on call", dsn=node.dsn)
    assert told == f"Role {shop} has what a reaper of shipping needs, in schema mailroom.\n"
    found = may(node, shop)
    done("grant", "writer", shop, dsn=node.dsn)
    told = done("revoke", "writer", shop, dsn=node.dsn)
    assert told == f"Role {shop} is no longer writer, in schema mailroom. It keeps what it needs as reaper.\n"
    assert may(node, shop) == found
    as_json = json_of("revoke", "reaper", shop, "--inbox", "shipping", dsn=node.dsn)
    assert (as_json["inboxes"], as_json["kept"], as_json["dry_run"]) == (["shipping"], [], False)
    assert may(node, shop) == none
    node.connection.execute(printed.encode())  # what a DBA does with it
    assert may(node, shop) == found


@pytest.mark.slow
def test_command_grants_several_purposes_or_none(node: Node, shop: str) -> None:
    none = may(node, shop)
    refused = mailroom("grant", "writer", "reaper", shop, "--inbox", "nowhere", dsn=node.dsn)
    assert "nowhere" in error_of(refused)
    assert may(node, shop) == none
    assert "--inbox NAME" in error_of(mailroom("grant", "writer", "reaper", shop, dsn=node.dsn))
    told = done("grant", "writer", "reaper", "dispatcher", "writer", shop, "--inbox", "shipping", dsn=node.dsn)
    assert told.splitlines()[:3] == [
        f"Role {shop} has what {named} needs, in schema mailroom."
        for named in ("a writer", "a reaper of shipping", "a dispatcher")
    ]
    found = may(node, shop)
    for purpose in ("writer", "dispatcher"):
        done("grant", purpose, shop, dsn=node.dsn)
    done("grant", "reaper", shop, "--inbox", "shipping", dsn=node.dsn)
    assert may(node, shop) == found != none


def test_command_prints_for_a_role_that_is_still_to_be_created(node: Node) -> None:
    printed = done("grant", "writer", "not yet", "--print", dsn=node.dsn)
    assert printed.startswith('GRANT USAGE ON SCHEMA "mailroom" TO "not yet";\n')
    assert "no role 'not yet'" in error_of(mailroom("grant", "writer", "not yet", dsn=node.dsn))


def test_command_says_what_it_lacks(node: Node) -> None:
    assert "--inbox NAME" in error_of(mailroom("grant", "reaper", "shop", dsn=node.dsn))
    assert "no writer or metrics" in error_of(
        mailroom("grant", "writer", "metrics", "shop", "--inbox", "shipping", dsn=node.dsn)
    )
    assert "no writer" in error_of(mailroom("revoke", "writer", "shop", "--inbox", "shipping", dsn=node.dsn))


# -- What a missing right says ----------------------------------------------------------------------------------------


def test_commands_of_the_advice_exist() -> None:
    for words, purpose in COMMANDS.items():
        assert purpose in PURPOSES
        assert mailroom(*words.split(), "--help").exit_code == 0
    assert purpose_of("parked list") == "auditor"
    assert purpose_of("parked replay") == "operator"
    assert purpose_of("inbox create") is None


def test_commands_that_only_look_need_the_grant_that_they_name(node: Node) -> None:
    lists = [words for words in COMMANDS if words.split()[-1] in ("list", "paused", "status", "statistics")]
    assert {"archive list", "parked list", "bridge status", "dispatcher status"} < set(lists)
    for purpose in ("auditor", "metrics"):
        with role(node.dsn, *rights(purpose)) as (_, dsn):
            for words in (words for words in lists if COMMANDS[words] == purpose):
                given = ["shipping"] if words in ("archive list", "inbox paused") else []
                found = mailroom(*words.split(), *given, dsn=dsn)
                assert "refused" not in found.stderr, found.stderr


REFUSED = [
    (("outbox", "send", "shipping", "--value", "1"), "grant writer {}"),
    (("inbox", "reap", "shipping", "--any"), "grant reaper {} --inbox shipping"),
    (("parked", "replay", "shipping", "--all"), "grant operator {} --inbox shipping"),
    (("status",), "grant metrics {}"),
    (("dispatcher", "deliver-all"), "grant dispatcher {}"),
    (("executor", "execute-all"), "grant executor {}"),
    (("dispatcher", "run"), "grant dispatcher {}"),
]


@pytest.mark.slow
def test_command_that_is_refused_names_the_grant(node: Node) -> None:
    with role(node.dsn, 'GRANT USAGE ON SCHEMA mailroom TO "{role}"') as (name, dsn):
        for arguments, command in REFUSED:
            said = error_of(mailroom(*arguments, dsn=dsn))
            told = f"Run, as the role that ran `mailroom migrate`: mailroom {command.format(name)}"
            assert said.endswith(told), said


def test_worker_and_lane_that_are_refused_name_the_grant(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with role(node.dsn, 'GRANT USAGE ON SCHEMA mailroom TO "{role}"') as (_, dsn):
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
            Worker(dsn, "shipping", lambda message, connection: None).run()
        advice = "Run, as the role that ran `mailroom migrate`: mailroom grant reaper ROLE --inbox shipping"
        assert refused.value.__notes__ == [advice]
        assert advice in caplog.text
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
            asyncio.run(Dispatcher(dsn).run())
        assert refused.value.__notes__ == [advice.replace("reaper ROLE --inbox shipping", "dispatcher ROLE")]
