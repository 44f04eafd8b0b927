"""`mailroom link`: what operators see and do, from a shell."""

import json
from typing import Any

import pytest

from mailroom.errors import InvalidMessage
from mailroom.links import Links
from tests.links.test_links import audited, do, meet, receive, stamp
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import Node


def link(node: Node, *arguments: str) -> str:
    return done("link", *arguments, "--actor", "ada", dsn=node.dsn)


def link_json(node: Node, *arguments: str) -> Any:
    return json.loads(done("link", *arguments, "--actor", "ada", "--json", dsn=node.dsn))


def status(node: Node) -> Any:
    return json_of("link", "status", dsn=node.dsn)


def test_two_nodes_are_linked_and_say_so(source: Node, target: Node) -> None:
    assert link(source, "allow", "south", "--keep-s", "60", "--max-rows", "1000", "--why", "new shop") == (
        "south may read this node. Now on south: mailroom link add NAME --as south\n"
    )
    assert link(source, "allow", "south") == "south could read this node already.\n"
    assert link(target, "add", "north", "--as", "south") == "The dispatcher reads north now, by MAILROOM_DSN_NORTH.\n"
    assert link(target, "add", "north") == "The dispatcher reads north already, by MAILROOM_DSN_NORTH.\n"
    assert link(target, "set", "north", "--service", "hq") == "Link to north: service none -> hq.\n"
    assert link_json(source, "set", "south", "--keep-s", "60")["change"] is None
    for wrong in ((), ("--service", "hq", "--keep-s", "1")):
        assert mailroom("link", "set", "south", *wrong, dsn=source.dsn).exit_code == 2
    assert audited(source)[0] == ("link allow", "south", 0, "ada", "new shop")
    [reader] = status(source)["readers"]
    assert (reader["name"], reader["keep_s"], reader["max_rows"]) == ("south", 60, 1_000)
    [found] = status(target)["sources"]
    assert (found["name"], found["reader"], found["service"]) == ("north", "south", "hq")


def test_allow_and_add_in_json(source: Node) -> None:
    assert link_json(source, "allow", "south") == {"reader": "south", "is_new": True}
    assert link_json(source, "add", "north") == {"source": "north", "is_new": True}
    assert link_json(source, "add", "north") == {"source": "north", "is_new": False}


def test_status_of_a_node_without_links(source: Node) -> None:
    assert done("link", "status", dsn=source.dsn) == (
        "No other node may read this one: mailroom link allow READER\n\n"
        "This node reads no other one: mailroom link add SOURCE\n"
    )
    assert status(source) == {"readers": [], "sources": []}
    assert "link" not in done("status", dsn=source.dsn)


def test_status_shows_what_waits_and_what_has_come_and_why_it_does_not(source: Node, target: Node) -> None:
    number = meet(source, target)
    stamp(source, number, 1, 12)
    source.connection.execute("UPDATE mailroom.link SET acked = 4")
    lines = done("link", "status", dsn=source.dsn).splitlines()
    assert lines[0].split() == ["read", "by", "state", "backlog", "lag", "acknowledged", "topics", "last", "seen"]
    assert lines[2].split()[:3] == ["south", "open", "8"]
    receive(target, target.value("SELECT number FROM mailroom.origin"), 4)
    target.connection.execute("UPDATE mailroom.origin SET state = 'stopped', why = 'the reason'")
    shown = done("link", "status", dsn=target.dsn, exit_code=1)
    assert "the reason" in shown
    [line] = [line for line in shown.splitlines() if line.startswith("north") and "ago" in line]
    assert line.split()[:4] == ["north", "stopped", "4", "40"]
    whole = done("status", dsn=target.dsn)
    assert "stopped: mailroom link status" in whole
    assert json_of("status", dsn=target.dsn)["sources"][0]["why"] == "the reason"


def test_link_in_doubt_is_shown_as_one(source: Node, target: Node) -> None:
    meet(source, target)
    source.connection.execute("UPDATE mailroom.node SET life = gen_random_uuid()")
    assert "open, in doubt" in done("link", "status", dsn=source.dsn)
    assert status(source)["readers"][0]["in_doubt"] is True


def test_removed_reader_says_what_is_given_up(source: Node, target: Node) -> None:
    number = meet(source, target)
    stamp(source, number, 1, 5)
    assert link(source, "remove", "south", "--dry-run") == (
        "The link to south would be removed; 5 messages that waited for it would be given up.\n"
    )
    assert link_json(source, "remove", "south") == {
        "name": "south", "side": "reader", "given_up": 5, "dry_run": False,
    }  # fmt: skip
    assert status(source)["readers"] == []
    assert link(target, "remove", "north", "--source", "--dry-run").startswith("north would be read no longer.")
    assert link(target, "remove", "north").startswith("north is read no longer.")
    assert status(target)["sources"] == []


def test_node_on_both_sides_is_removed_on_one(source: Node) -> None:
    do(source, "allow", "south")
    do(source, "add", "south")
    line = error_of(mailroom("link", "remove", "south", dsn=source.dsn))
    assert line.endswith("Say which link is meant: mailroom link remove south --reader, or --source")
    assert link_json(source, "remove", "south", "--reader")["side"] == "reader"
    assert link_json(source, "remove", "south")["side"] == "source"


def test_source_is_excluded_and_included(target: Node) -> None:
    do(target, "add", "north")
    assert link(target, "exclude", "north", "--dry-run").startswith("north would be excluded.")
    assert link(target, "exclude", "north", "--why", "no power") == (
        "north is excluded. To read it again: mailroom link include north\n"
    )
    assert link(target, "exclude", "north") == "north is excluded already.\n"
    assert "excluded by ada: no power" in done("link", "status", dsn=target.dsn)
    assert link(target, "include", "north") == "north is read again.\n"
    assert link(target, "include", "north") == "north was not excluded.\n"
    assert link_json(target, "exclude", "north") == {"source": "north", "excluded": True, "dry_run": False}
    assert link_json(target, "include", "north") == {"source": "north", "included": True}


def test_link_is_cut_by_hand(source: Node, target: Node) -> None:
    number = meet(source, target)
    stamp(source, number, 1, 5)
    assert link(source, "cut", "south", "--dry-run") == (
        "The link to south would be cut; 5 messages that waited would be given up.\n"
    )
    assert link_json(source, "cut", "south") == {"reader": "south", "given_up": 5, "dry_run": False}
    assert status(source)["readers"][0]["state"] == "cut"


def test_source_is_resumed_where_it_stopped_or_at_a_row(source: Node, target: Node) -> None:
    meet(source, target)
    number = target.value("SELECT number FROM mailroom.origin")
    receive(target, number, 4)
    target.connection.execute("UPDATE mailroom.origin SET state = 'stopped', why = 'the reason'")
    assert link(target, "resume", "north", "--at", "9", "--dry-run") == (
        "north would be read again after row 9.\nIt was stopped: the reason\nRows 5 to 9 are never read.\n"
    )
    assert link(target, "resume", "north") == "north is read again.\nIt was stopped: the reason\n"
    assert status(target)["sources"][0]["state"] == "open"
    assert link_json(target, "resume", "north", "--at", "9") == {
        "source": "north", "was": None, "at": 9, "known": 0, "never_read": [5, 9], "may_come_twice": None,
        "dry_run": False,
    }  # fmt: skip
    assert status(target)["sources"][0]["position"] == 9
    assert "Rows 5 to 9 never came." in done("link", "report", "north", dsn=target.dsn)


def test_total_inboxes_that_stand_for_lost_history_are_resumed_without_a_source(target: Node) -> None:
    assert link(target, "resume") == "No inbox of total order stood for lost history.\n"
    target.connection.execute("UPDATE mailroom.node SET incarnation = 2")
    assert link(target, "resume", "--why", "looked through") == "The inboxes of total order go on.\n"
    assert target.value("SELECT resumed FROM mailroom.node") == 2
    assert link_json(target, "resume") == {"resumed": False}
    assert audited(target) == [("link resume", None, 0, "ada", "looked through")]


def test_report_lists_what_the_source_has_lost(source: Node, target: Node) -> None:
    meet(source, target)
    number = target.value("SELECT number FROM mailroom.origin")
    lost = target.value("INSERT INTO mailroom.known VALUES (%s, gen_random_uuid()) RETURNING message_id", number)
    assert done("link", "report", "north", dsn=target.dsn) == (
        f"north is open.\n1 message that north has lost is here.\n{lost}\n"
    )
    assert json_of("link", "report", "north", dsn=target.dsn) == {
        "name": "north", "state": "open", "why": None, "lost": [str(lost)], "skipped": [], "earlier": 0,
        "more_lost": 0,
    }  # fmt: skip


def test_report_is_bounded_and_says_how_many_more_were_lost(source: Node, target: Node) -> None:
    meet(source, target)
    number = target.value("SELECT number FROM mailroom.origin")
    target.connection.execute(
        "INSERT INTO mailroom.known SELECT %s, gen_random_uuid() FROM generate_series(1, %s)", [number, 1_003]
    )
    lost = tuple(id for (id,) in target.rows("SELECT message_id FROM mailroom.known ORDER BY message_id"))
    head, count, *listed, more = done("link", "report", "north", dsn=target.dsn).splitlines()
    assert (head, count) == ("north is open.", "1,003 messages that north has lost are here.")
    assert (listed, more) == ([*map(str, lost[:1_000])], "3 more are not listed: give a larger --limit.")
    assert done("link", "report", "north", "--limit", "1002", dsn=target.dsn).endswith(
        f"{lost[1_001]}\n1 more is not listed: give a larger --limit.\n"
    )
    short = json_of("link", "report", "north", "--limit", "2", dsn=target.dsn)
    assert (short["lost"], short["more_lost"]) == ([*map(str, lost[:2])], 1_001)
    for limit, listed_ids in ((1_003, lost), (None, lost), (7, lost[:7])):
        report = Links().report(target.connection, "north", limit=limit)
        assert (report.lost, report.more_lost) == (listed_ids, 1_003 - len(listed_ids))
    assert len(Links().report(target.connection, "north").lost) == 1_000
    with pytest.raises(InvalidMessage, match="limit"):
        Links().report(target.connection, "north", limit=0)


def test_moved_node_is_let_in_again(source: Node, target: Node) -> None:
    meet(source, target)
    source.connection.execute("UPDATE mailroom.link SET reader_database_oid = 1")
    assert link(source, "moved", "south") == "Where south is now will be noted at its next hello.\n"
    meet(source, target)
    assert link_json(target, "moved", "north") == {"name": "north", "reader": False, "source": True}


def test_link_that_is_not_there_is_told_in_one_line(source: Node) -> None:
    commands = ("remove", "exclude", "include", "cut", "resume", "report", "moved")
    results = {command: mailroom("link", command, "nowhere", dsn=source.dsn) for command in commands}
    assert {command: result.exit_code for command, result in results.items()} == dict.fromkeys(commands, 1)
    assert [each for each in commands if not error_of(results[each]).endswith("See: mailroom link status")] == []


WRONG = (
    ("allow", "1st"),
    ("allow", "south", "--keep-s", "-1"),
    ("allow", "south", "--max-rows", "-1"),
    ("add", "north", "--service", "postgresql://me:secret@host/db"),
    ("add", "north", "--as", "a b"),
    ("add", "north", "--source-schema", "Shop"),
    ("resume", "north", "--at", "-1"),
    ("resume", "--at", "1"),
    ("resume", "--dry-run"),
)


def test_wrong_usage_is_told_and_no_secret_with_it(source: Node) -> None:
    results = {arguments: mailroom("link", *arguments, dsn=source.dsn) for arguments in WRONG}
    assert {arguments: result.exit_code for arguments, result in results.items()} == dict.fromkeys(WRONG, 2)
    assert [each for each in WRONG if "secret" in error_of(results[each])] == []
