"""An operator acts from a page: it is done in the database, and the audit has who did it and why."""

import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import parse_qsl, urlencode

import httpx
import pytest

from dispatcher.dashboard import User
from inbox import Inbox, Park
from inbox.by_key.failure import failed
from inbox.order import reading_order
from mailroom.sql.runner import run
from outbox import Periodic, PeriodicMessage
from tests.dashboard.conftest import Client, browsing, forms
from tests.support.node import CLOCKS_ALLOWED, Node, failing

WHY = "the carrier is back"

pytestmark = [
    pytest.mark.inbox("shipping", "order.paid", max_attempts=1, keep_reaped_days=1),
    pytest.mark.node_sql(CLOCKS_ALLOWED),
]


@pytest.fixture
def browser(node: Node) -> Iterator[Client]:
    with browsing(node.dsn) as client:
        yield client


def parked_key(node: Node, key: str = "k", messages: int = 2) -> None:
    for _ in range(messages):
        node.send("order.paid", key=key)
    node.deliver_all()
    with node.connection.transaction():
        [first, *_] = Inbox("shipping").peek(node.connection, key)
        run(node.connection, failing("shipping", first, Park("no such street")))


def act(client: Client, path: str, *named: str, why: str = WHY, **more: str) -> httpx.Response:
    """Fill in the form of a page, and send it."""
    fields = forms(client.get(path).text)[named]
    return client.post(f"/act/{named[0]}", **fields, why=why, **more)


def audited(node: Node) -> list[tuple[object, ...]]:
    return node.rows("SELECT actor, action, inbox, key, messages, reason FROM mailroom.audit ORDER BY id")


@pytest.mark.slow
def test_a_key_is_replayed_and_the_page_tells_it_once(node: Node, browser: Client) -> None:
    parked_key(node)
    answer = act(browser, "/parked?matching=street", "replay/parked", "k")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/parked?matching=street"
    assert audited(node) == [("ada@ops", "parked replay", "shipping", "k", 2, WHY)]
    assert node.value("SELECT count(*) FROM mailroom.parked") == 0
    assert "2 messages of 1 parked key replayed." in browser.get("/parked").text
    assert "replayed." not in browser.get("/parked").text


def test_failing_keys_are_tried_now_one_or_all_of_a_filter_in_all_their_inboxes(node: Node, browser: Client) -> None:
    node.inbox("shipping", backoff_s=3600, max_attempts=9)
    node.inbox("ledger", "order.paid", order="total", backoff_s=3600, max_attempts=9)
    for key in "abc":
        node.send("order.paid", key=key)
    node.deliver_all()
    with node.connection.transaction():
        for key in "abc":
            [first] = Inbox("shipping").peek(node.connection, key)
            run(node.connection, failing("shipping", first, OSError(key)))
        [first] = Inbox("ledger").peek(node.connection, limit=1)
        order = run(node.connection, reading_order("mailroom", "ledger"))
        run(node.connection, order.recording(failed(first, OSError("a"))))
    node.connection.execute("UPDATE mailroom.key_state SET retry_at = now() WHERE key = 'c'")  # it is due
    page = browser.get("/failing").text
    assert re.findall(r'<span class="unit">(\d+ keys)</span>', page) == ["4 keys"]
    # Those of each error, and all: none of them is due.
    assert re.findall(r'class="on">(\d keys?)\. ', page) == ["2 keys", "1 key", "3 keys"]
    assert re.findall(r'class="on">(\d keys?)\. ', browser.get("/failing?matching=b").text) == ["1 key", "1 key"]
    act(browser, "/inboxes/shipping/key?key=b", "retry/inbox", "b")
    assert "1 failing key will be tried at once." in browser.get("/failing").text
    assert "Try all" not in browser.get("/failing?matching=c").text
    csrf = forms(browser.get("/failing").text)["retry/inbox", "a"]["csrf"]
    assert browser.post("/act/retry/inbox", csrf=csrf, why=WHY).status_code == 400  # it names nothing
    assert browser.post("/act/retry/inbox", csrf=csrf, why=WHY, error="", all="1").status_code == 303
    assert len(audited(node)) == 1  # no key fails without any text
    browser.post("/act/retry/inbox", csrf=csrf, why=WHY, error="OSError", all="1")
    assert [each[:4] for each in audited(node)] == [
        ("ada@ops", "inbox retry", inbox, key) for inbox, key in (("shipping", "b"), ("ledger", ""), ("shipping", "a"))
    ]


@pytest.mark.slow
def test_the_first_message_of_a_key_is_discarded_and_replayed_from_the_archive(node: Node, browser: Client) -> None:
    parked_key(node, messages=3)
    id = str(node.value("SELECT message_id FROM mailroom.parked ORDER BY clock LIMIT 1"))
    act(browser, "/inboxes/shipping/key?key=k", "discard/parked", "k", sure="1", first="1")
    assert audited(node) == [("ada@ops", "parked discard", "shipping", "k", 1, WHY)]
    assert "1 message of 1 parked key discarded; 0 keys no longer parked." in browser.get("/").text
    assert "was discarded from inbox shipping" in browser.get("/message/path", id=id).text
    act(browser, f"/message/path?id={id}", "replay/archive", id)
    assert audited(node)[1:] == [("ada@ops", "archive replay", "shipping", "k", 1, WHY)]


@pytest.mark.slow
def test_all_keys_that_a_filter_chooses_are_replayed(node: Node, browser: Client) -> None:
    parked_key(node, "a")
    parked_key(node, "b")
    node.connection.execute("UPDATE mailroom.key_state SET last_error = 'other' WHERE key = 'b'")
    act(browser, "/parked?inbox=shipping&matching=street", "replay/parked", "1")
    assert audited(node) == [("ada@ops", "parked replay", "shipping", "a", 2, WHY)]


def test_ticked_keys_or_all_of_a_filter_are_changed_in_all_their_inboxes(node: Node, browser: Client) -> None:
    node.inbox("ledger", "order.paid", order="total", max_attempts=1)
    for key in ("a", "b\nc", "d e&f", "g"):
        parked_key(node, key, 1)
    with node.connection.transaction():
        [first] = Inbox("ledger").peek(node.connection, limit=1)
        order = run(node.connection, reading_order("mailroom", "ledger"))
        run(node.connection, order.recording(failed(first, Park("no such account"))))
        run(node.connection, order.claiming_due())  # which ends it
    page = browser.get("/parked").text
    assert re.findall(r"[\d,]+ messages of \d+ keys", page) == ["8 messages of 5 keys"] * 2  # also of the total inbox
    boxes = re.findall(r'class="pick" form="ticked" name="([^"]+)" value="([^"]+)"', page)
    values = {(of := dict(parse_qsl(unescape(value), keep_blank_values=True)))["key"]: (name, unescape(value), of)
              for name, value in boxes}  # fmt: skip
    assert {key: of["inbox"] for key, (_, _, of) in values.items()} == {
        "": "ledger", "a": "shipping", "b\nc": "shipping", "d e&f": "shipping", "g": "shipping"
    }  # fmt: skip

    def change(action: str, *keys: str, **more: str) -> httpx.Response:
        form = forms(browser.get("/parked").text)["replay/parked",]
        return browser.post(f"/act/{action}/parked", **form, why=WHY, **dict(values[key][:2] for key in keys), **more)

    assert change("replay").status_code == 400
    assert change("discard", "a").status_code == 400  # not sure
    forged = {"of-9": urlencode({"inbox": "shipping", "key": ""})}
    assert change("replay", **forged).status_code == 400
    assert audited(node) == []
    assert change("replay", "", "b\nc").status_code == 303
    assert "5 messages of 2 parked keys replayed." in browser.get("/").text
    change("discard", "d e&f", sure="1")
    act(browser, "/parked", "replay/parked", "1")
    assert [each[1:5] for each in audited(node)] == [
        ("parked replay", "ledger", "", 4), ("parked replay", "shipping", "b\nc", 1),
        ("parked discard", "shipping", "d e&f", 1), ("parked replay", "shipping", "a", 1),
        ("parked replay", "shipping", "g", 1),
    ]  # fmt: skip


def test_dead_letters_are_requeued_and_discarded(node: Node, browser: Client) -> None:
    for key in "abc":
        node.send("nobody", key=key)
    node.deliver_all()
    first, second, _ = [str(id) for (id,) in node.rows("SELECT id FROM mailroom.dead_letter ORDER BY id")]
    act(browser, "/dead-letters", "requeue/dead-letter", first)
    act(browser, "/dead-letters", "discard/dead-letter", second, sure="1")
    assert node.waiting() == ["a"]
    assert [key for key, *_ in node.dead()] == ["c"]
    act(browser, "/dead-letters?matching=no+inbox", "requeue/dead-letter", "1")
    assert node.waiting() == ["a", "c"]
    assert [(action, number, why) for _, action, _, _, number, why in audited(node)] == [
        ("dead-letter requeue", 1, WHY), ("dead-letter discard", 1, WHY), ("dead-letter requeue", 1, WHY)
    ]  # fmt: skip


@pytest.mark.slow
def test_inboxes_and_keys_are_paused_and_resumed(node: Node, browser: Client) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    key_page = "/inboxes/shipping/key?key=k"
    act(browser, "/inboxes/shipping", "pause/inbox")
    act(browser, "/inboxes/shipping", "resume/inbox")
    act(browser, key_page, "pause/inbox", "k")
    assert "Paused by ada@ops" in browser.get(key_page).text
    act(browser, key_page, "resume/inbox", "k")
    assert [each[:4] for each in audited(node)] == [
        ("ada@ops", f"inbox {action}", "shipping", key) for key in (None, "k") for action in ("pause", "resume")
    ]


def test_a_scheduled_message_is_cancelled(node: Node, browser: Client) -> None:
    id = node.send("order.paid", key="k")
    act(browser, f"/message/path?id={id}", "cancel/outbox", str(id))
    assert node.waiting() == []
    assert audited(node) == [("ada@ops", "outbox cancel", None, "k", 1, WHY)]
    assert f"Message {id} is cancelled." in browser.get("/").text


@pytest.mark.slow
def test_a_reaped_message_is_replayed(node: Node, browser: Client) -> None:
    id = node.send("order.paid", key="k")
    node.deliver_all()
    with node.connection.transaction():
        Inbox("shipping").reap(node.connection, "k")
    act(browser, f"/message/path?id={id}", "replay/archive", str(id))
    assert audited(node) == [("ada@ops", "archive replay", "shipping", "k", 1, WHY)]
    assert len(node.delivered()) == 1


@pytest.mark.slow
def test_periodic_messages_are_paused_and_resumed(node: Node, browser: Client) -> None:
    with node.connection.transaction():
        Periodic().add(node.connection, PeriodicMessage("nightly", "30 2 * * *", "report.due"), actor="eve")
    act(browser, "/waiting", "pause/periodic")
    assert node.value("SELECT paused FROM mailroom.periodic") is True
    act(browser, "/waiting", "resume/periodic")
    assert [(each[0], each[1]) for each in audited(node)][1:] == [
        ("ada@ops", "periodic pause"), ("ada@ops", "periodic resume")
    ]  # fmt: skip


@pytest.mark.slow
def test_an_act_that_fails_changes_nothing_and_says_why(node: Node, browser: Client) -> None:
    csrf = forms(browser.get("/inboxes/shipping").text)["pause/inbox",]["csrf"]
    answer = browser.post("/act/resume/bridge", csrf=csrf, name="kafka", why=WHY)
    assert answer.status_code == 409
    assert "MR-unknown-bridge" in answer.text
    assert audited(node) == []


@pytest.mark.slow
def test_a_user_with_one_right_is_shown_and_allowed_that_one_alone(node: Node) -> None:
    parked_key(node)
    with browsing(node.dsn, User("bob", {"replay"})) as client:
        found = forms(client.get("/parked").text)
        assert {each[0] for each in found} == {"replay/parked"}
        csrf = found["replay/parked", "k"]["csrf"]
        fields = {"csrf": csrf, "inbox": "shipping", "key": "k", "why": WHY}
        refused = client.post("/act/discard/parked", sure="1", **fields)
        assert refused.status_code == 403
        assert "bob may not discard here." in refused.text
        assert audited(node) == []
        assert client.post("/act/replay/parked", **fields).status_code == 303
    assert audited(node) == [("bob", "parked replay", "shipping", "k", 2, WHY)]


@pytest.mark.slow
def test_a_form_that_names_nothing_changes_nothing(node: Node, browser: Client) -> None:
    parked_key(node)
    csrf = forms(browser.get("/inboxes/shipping").text)["pause/inbox",]["csrf"]
    sent: list[tuple[str, dict[str, str]]] = [
        ("replay/parked", {"inbox": "shipping"}),  # neither a key nor all of them
        ("replay/parked", {"key": "k"}),
        ("discard/parked", {"inbox": "shipping", "key": "k"}),  # not sure
        ("requeue/dead-letter", {}),
        ("requeue/dead-letter", {"id": "x"}),
        ("cancel/outbox", {"id": "x"}),
        ("pause/inbox", {"inbox": "NO NAME"}),
        ("pause/inbox", {"inbox": "shipping", "why": " "}),
    ]
    answers = [browser.post(f"/act/{act}", **{"csrf": csrf, "why": WHY} | given).status_code for act, given in sent]
    assert [each for each, status in zip(sent, answers, strict=True) if status != 400] == []
    assert audited(node) == []


@pytest.mark.slow
def test_afterwards_the_browser_is_led_to_no_other_site(node: Node, browser: Client) -> None:
    fields = forms(browser.get("/inboxes/shipping").text)["pause/inbox",]
    for back in ("//evil.example/", "https://evil.example/", "/\\evil.example", "/x\r\nset-cookie: a=b"):
        answer = browser.post("/act/pause/inbox", **fields | {"back": back}, why=WHY)
        assert answer.headers["location"] == "/"
