"""Each page answers, and shows what it should, of a node with trouble in it; and none loads anything from elsewhere."""

import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from urllib.parse import quote
from uuid import uuid4

import psycopg
import pytest
from markupsafe import escape
from starlette.applications import Starlette
from starlette.routing import Mount

from dispatcher.dashboard import READ_ONLY, User, app, charts
from dispatcher.dashboard.chosen import AT_ONCE
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.rendering import STATIC
from mailroom.doctor.examining import LOOK
from mailroom.figures.parked_keys import KEY_MESSAGES
from mailroom.sql.sqlstate import sqlstate
from tests.dashboard.conftest import ADA, LIMITS_OF_THE_PRODUCT, Client, browsing, forms
from tests.dashboard.trouble import KEY, SCRIPT, SECRET, Trouble
from tests.support.node import Node
from tests.support.waiting import eventually

ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"
HTMX = "2.0.11", "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"

SHOWS = {
    "/": ("something waits, and no process leads", 'inbox <a href="/inboxes/shipping">shipping</a>: 1 parked key',
          "a log dropped messages", "mailroom parked list shipping", '<a href="/workers">Workers</a>',
          '<a href="/parked">Parked keys</a>',
          "ValueError: no such street", '<div class="scale" aria-hidden="true">',
          '<div class="times" aria-hidden="true"><span>', "there are dead letters: stage deliver: 2",
          "messages/s", "<svg", "<dt>Paused</dt>",
          '<span class="unit">inbox</span>'),
    "/inboxes": ("shipping", "billing", "quiet", "1 parked key", "paused"),
    "/inboxes?named=ship": ("shipping", "1 to 1 of 1"),
    "/inboxes/shipping": ("ConnectionError: carrier said", "order.*", "3 days", "then the key is parked", "<svg"),
    "/inboxes/billing": ("10 messages/s, burst 10", "50 % of attempts failing", "no such street", "ada: the address"),
    "/inboxes/quiet": ("Paused since", "ada: moving house", "Resume", "its own name"),
    "/inboxes/search": ('<a href="/logs/events">events</a>', "Nothing was diverted from its log."),
    "/logs": ('<a href="/logs/events">events</a>', "2 days", "kept", "MiB"),
    "/logs/events": ("event.#", '<a href="/inboxes/search">search</a>', "by 5 days", "20 lost", "holds disk",
                     "mailroom inbox rewind INBOX", "<dt>Lanes</dt><dd>64</dd>"),
    "/failing": ("By error", "ValueError", "Try all now", "Try now", "up to 1"),
    "/failing?inbox=billing&error=ValueError": ("Try all shown by this filter now", "no such street", "1 key</span>"),
    "/failing?matching=nothing": ("No failing key fits.",),
    "/parked": ("shipping", "ConnectionError", "Replay", "Discard", "Replay all…", "With those ticked", "1 key</span>"),
    "/parked?inbox=shipping&matching=carrier": ("Replay all shown by this filter", "ConnectionError"),
    "/parked?matching=nothing": ("No parked key fits.",),
    "/dead-letters": ("nobody.wants", "no inbox gets this topic", "Requeue", "lost", "2 dead letters</span>"),
    "/dead-letters?stage=reap": ("No dead letter fits.",),
    "/message": ("Give the id of a message, or a key.",),
    "/message?find=%20tomorrow%20": ('hx-get="/message/key?key=+tomorrow+"',),
    "/message?find=tomorrow": ('hx-get="/message/key?key=tomorrow"',),
    "/message/key?key=tomorrow": ("is in inbox shipping", "is in inbox billing"),
    "/message/key?key=done": ("in inbox billing is paused since", "was reaped from inbox shipping"),
    "/message/key?key=nobody": ("No message of this key was found on this node.",),
    "/routes": ("order.*", "this node"),
    "/routes?topic=order.paid": ("Who gets order.paid", "billing", "shipping", "order.*", "exactly one receiver"),
    "/routes?topic=quiet": ("its own name",),
    "/routes?topic=no.body": ("Nobody gets this topic.", "mailroom inbox subscribe INBOX no.body"),
    "/waiting": ("nightly", "30 2 * * *", "later", "Cancel"),
    "/executables": ("No executor has run yet.", "store.put", "stock/1", "public.stats"),
    "/workers": ("No dispatcher has run yet.", "mailroom dispatcher run", "No worker is at work."),
    "/links": ("lyon", "This node reads no other one.", "This node publishes to no broker."),
    "/doctor": ("Looking",),
    "/doctor/findings": ("M040", "keys are parked", "It and all later ones of its key wait until an operator acts.",
                         "<code>mailroom parked replay</code>", '<a href="/parked">Parked keys</a>',
                         'inbox <a href="/inboxes/shipping">shipping</a>', "mailroom dead-letter list"),
    "/audit": ("ada", "pause", "moving house", "the shop in Lyon"),
}  # fmt: skip


def test_a_page_shows_what_it_should(browser: Client) -> None:
    missing = []
    for path, shown in SHOWS.items():
        answer = browser.get(path)
        missing += [(path, answer.status_code, text) for text in shown if text not in answer.text]
        assert answer.status_code == 200, answer.text
    assert missing == []


def test_each_page_and_each_dialog_says_which_node_it_is(browser: Client, trouble: Trouble) -> None:
    name, database = trouble.node.rows("SELECT name, current_database()::text FROM mailroom.node")[0]
    at = f"Node <b>{name}</b>: schema mailroom of database {database} on"
    for path in ("/", "/parked", "/dead-letters", "/waiting", "/inboxes/shipping/key?key=" + quote(KEY), "/nothing"):
        page = browser.get(path).text
        assert f" · {name} · Mailroom</title>" in page, path
        assert f'<span class="whose"><b>{name}</b> <span class="unit">{database} on' in page, path
        assert page.count(at) == page.count(" popover aria-label="), path
    parked = browser.get("/parked").text
    assert parked.count("2 messages of key") == 2
    assert "Inbox <b>shipping</b>. Node" in parked
    assert parked.count("The archive of shipping keeps what is discarded for 3 days, and can replay it.") == 3
    assert browser.get("/dead-letters").text.count("No archive keeps what is discarded.") == 3
    assert "2 messages of key" in browser.get("/inboxes/shipping/key", key=KEY).text


def test_no_two_buttons_of_a_page_have_one_name(browser: Client) -> None:
    for path in ("/parked", "/failing", "/dead-letters", "/waiting", "/inboxes/billing/key?key=done"):
        names = re.findall(r'class="opens[^>]*?aria-label="([^"]+)"', browser.get(path).text)
        assert names, path
        assert len(set(names)) == len(names), path
    assert f"Replay key {escape(KEY)} of inbox shipping" in browser.get("/parked").text


def test_a_locked_inbox_takes_no_page_of_others(browser: Client, trouble: Trouble) -> None:
    with psycopg.connect(trouble.node.dsn, application_name="nightly") as holder:
        holder.execute("LOCK TABLE mailroom.inbox_quiet")
        told = f"inbox_quiet cannot be read: pid {holder.info.backend_pid} (nightly"
        eventually(lambda: told in browser.get("/").text)  # the last look may still be shown
        assert told in browser.get(f"/message/path?id={trouble.waiting}").text
        for path in ("/", "/inboxes", "/inboxes/shipping"):
            assert browser.get(path).status_code == 200, path
        # Of the inbox itself a page has what its table is not needed for, and the holder before it.
        holder.execute("LOCK TABLE mailroom.inbox_shipping")
        for path, shown in (
            ("/inboxes/shipping", "Its table cannot be read now"),
            (f"/inboxes/shipping/key?key={KEY}", "carrier said"),
            ("/parked", '<td class="n" data-label="Messages">unknown'),
        ):
            text = browser.get(path).text
            assert text.index("inbox_shipping cannot be read: pid") < text.index(shown), path
        holder.rollback()


def test_a_key_has_its_state_messages_and_attempts(browser: Client) -> None:
    text = browser.get("/inboxes/shipping/key", key=KEY).text
    for shown in ("parked", "Attempt 1", f"ConnectionError: carrier said {ESCAPED}", "Replay", "Discard", "order.paid"):
        assert shown in text
    assert text.count('class="id"') == 3  # two messages, and that of the attempt
    failing = browser.get("/inboxes/billing/key", key=KEY).text
    assert "again in" in failing
    assert "ValueError: no such street" in failing
    paused = browser.get("/inboxes/billing/key", key="done").text
    assert "Paused by ada: the address is being checked" in paused
    assert "Resume" in paused
    assert "well" in browser.get("/inboxes/billing/key", key="tomorrow").text


PATHS = {
    "parked": ("parked since", "Inbox"),
    "waiting": ("is in inbox shipping", "is in inbox billing"),
    "scheduled": ("is scheduled for", "Cancel"),
    "sent": ("is in the outbox", "Cancel"),
    "reaped": ("was reaped from inbox shipping", "Replay"),
    "dead": ("is a dead letter since", "no inbox gets this topic"),
}


def test_the_path_of_a_message(browser: Client, trouble: Trouble) -> None:
    for which, shows in PATHS.items():
        id = str(getattr(trouble, which))
        page = browser.get("/message", find=id).text
        assert f'hx-get="/message/path?id={id}"' in page
        text = browser.get("/message/path", id=id).text
        assert [shown for shown in (*shows, "--payloads") if shown not in text] == [], which


@pytest.mark.slow
def test_a_message_that_is_nowhere(browser: Client) -> None:
    assert "It is nowhere on this node." in browser.get("/message/path", id=str(uuid4())).text


def every_page(browser: Client, trouble: Trouble) -> Iterator[str]:
    for path in SHOWS:
        yield browser.get(path).text
    yield browser.get("/inboxes/shipping/key", key=KEY).text
    for name in PATHS:
        yield browser.get("/message/path", id=str(getattr(trouble, name))).text


@pytest.mark.slow
def test_no_payload_is_shown_unless_allowed(browser: Client, trouble: Trouble) -> None:
    assert not [page for page in every_page(browser, trouble) if SECRET in page]


def test_payloads_are_shown_if_allowed(trouble: Trouble) -> None:
    with browsing(trouble.node.dsn, payloads=True) as client:
        for which in PATHS:
            text = client.get("/message/path", id=str(getattr(trouble, which))).text
            assert SECRET in text, which
            assert SCRIPT not in text, which


class _Loads(HTMLParser):
    """Collects what a page loads or leads to, and what a strict policy would refuse."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.refused: list[str] = []
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "action", "hx-get", "srcset")]
        self.refused += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and not given.get("src")):
            self.refused.append(tag)
        self.scripts += tag == "script"


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere_and_no_script_is_in_a_page(browser: Client, trouble: Trouble) -> None:
    for page in every_page(browser, trouble):
        found = _Loads(page)
        assert found.loads
        assert not [each for each in found.loads if not re.match(r"/(?!/)|#", each)]
        assert not found.refused
        assert found.scripts == 2
        assert SCRIPT not in page
    for file in STATIC.glob("dashboard.*"):
        assert not re.search(r"https?://|@import|url\(", file.read_text())


def test_the_policy_of_a_page_is_strict(browser: Client) -> None:
    answer = browser.get("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["form-action"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert '"allowEval":false' in answer.text
    assert '"selfRequestsOnly":true' in answer.text


def test_htmx_is_the_release_that_it_is_said_to_be() -> None:
    file = (STATIC / "htmx.min.js").read_bytes()
    assert hashlib.sha256(file).hexdigest() == HTMX[1]
    assert f'version:"{HTMX[0]}"'.encode() in file
    assert (STATIC / "htmx.LICENSE").read_text().startswith("Zero-Clause BSD")


@pytest.mark.slow
def test_static_files_are_kept_by_browsers_and_no_others_are_served(browser: Client) -> None:
    page = browser.get("/").text
    for path in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
        answer = browser.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert browser.get("/static/htmx.LICENSE").status_code == 404
    assert browser.get("/static/..%2fapp.py").status_code == 404


def test_what_no_page_asks_is_an_error_that_says_so(browser: Client) -> None:
    asked = {
        "/nothing": 404,
        "/inboxes/nothing": 404,
        "/logs/nothing": 404,
        "/inboxes/NOT-A-NAME": 400,
        "/inboxes/shipping/key": 400,
        "/message?id=4711": 400,
        "/dead-letters?after=-1": 400,
        "/dead-letters?stage=x": 400,
        "/waiting?at=yesterday": 400,
        "/audit?before=9999999999999999999999": 400,
        "/routes?topic=no%20topic": 400,
    }
    answers = {path: browser.get(path) for path in asked}
    assert {path: answer.status_code for path, answer in answers.items()} == asked
    assert [path for path, answer in answers.items() if 'role="alert"' not in answer.text] == []


@pytest.mark.slow
def test_a_list_goes_on_where_a_page_ended(trouble: Trouble, browser: Client) -> None:
    connection = trouble.node.connection
    number = PAGE_ROWS + 10
    connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error) "
        "SELECT 'quiet', 'p' || lpad(n::text, 4, '0'), 1, 1, 'infinity', clock_timestamp(), 'X' "
        "FROM generate_series(1, %s) AS n",
        [number],
    )
    connection.execute(
        "INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, sent_at) "
        "SELECT 'execute', 'Y', gen_random_uuid(), 'store.put', n::text, 'M', 'U', now() "
        "FROM generate_series(1, %s) AS n",
        [number],
    )
    connection.execute(
        "INSERT INTO mailroom.audit (actor, action, messages) SELECT 'eve', 'look', 1 FROM generate_series(1, %s)",
        [number],
    )
    lists = {
        "/parked?inbox=quiet": r'class="key" href="[^"]+">p0',
        "/dead-letters?stage=execute": "<code>store.put",
        "/audit": ">eve <",
    }
    try:
        for path, row in lists.items():
            first = browser.get(path).text
            assert len(re.findall(row, first)) == PAGE_ROWS, path
            [more] = re.findall(r'<a href="([^"]+)" rel="next">', first)
            second = browser.get(more.replace("&amp;", "&")).text
            assert len(re.findall(row, second)) == number - PAGE_ROWS, path
            assert "From the beginning" in second
        keys = browser.get("/inboxes/quiet").text
        assert keys.count(">p0") == PAGE_ROWS
        assert "rel=" in keys
    finally:
        connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet'")
        connection.execute("DELETE FROM mailroom.dead_letter WHERE stage = 'execute'")
        connection.execute("DELETE FROM mailroom.audit WHERE actor = 'eve'")


@pytest.mark.slow
def test_who_gets_a_topic_goes_on_where_a_page_ended(node: Node) -> None:
    names = [f"box_{n:03}" for n in range(PAGE_ROWS + 10)]
    for name in names[1:]:
        node.inbox(name, "order.paid")
    node.inbox(names[0], "order.*")
    with browsing(node.dsn) as browser:
        first = browser.get("/routes", topic="order.paid").text
        [more] = re.findall(r'<a href="([^"]+)" rel="next">', first.split('id="all"')[0])
        second = browser.get(more.replace("&amp;", "&")).text
    shown = [
        re.findall(r'<th scope="row"><a [^>]+>(box_\d+)</a>', page.split('id="all"')[0]) for page in (first, second)
    ]
    assert shown == [names[:PAGE_ROWS], names[PAGE_ROWS:]]
    # How many there are is said on each page, and so is what that means to a command.
    for page in (first, second):
        assert f'Who gets order.paid <span class="unit">{PAGE_ROWS + 10}</span>' in page
        assert "exactly one receiver" in page
    assert "From the beginning" in second


PARKED = (
    "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error) "
    "SELECT %s, %s || n, 1, 1, 'infinity', now() - %s::interval - n * interval '1 ms', %s "
    "FROM generate_series(1, %s) AS n"
)


def test_parked_keys_are_grouped_and_a_click_on_a_group_shows_it(node: Node) -> None:
    for inbox in ("billing", "shipping"):
        node.inbox(inbox)
    for given in (
        ("shipping", "c", "1 min", "ConnectionError: down", 104),
        ("billing", "v", "3 days", "ValueError: no street", 3),
        ("billing", "w", "9 days", "ValueError: no town", 2),
    ):
        node.connection.execute(PARKED, given)

    def groups(page: str) -> list[tuple[str, str]]:
        chips = re.findall(r'<a class="chip" href="([^"]+)">([^<]+) <span class="unit">([\d,]+ keys?)</span>', page)
        return [(f"{name} {keys}", unescape(path)) for path, name, keys in chips]

    with browsing(node.dsn) as browser:
        page = browser.get("/parked").text
        found = dict(groups(page))
        assert list(found) == [
            "ConnectionError 104 keys", "ValueError 5 keys", "less than an hour 104 keys", "days 3 keys",
            "more than a week 2 keys", "shipping 104 keys", "billing 5 keys",
        ]  # fmt: skip
        assert '<span class="unit">109 keys</span>' in page
        assert page.count("0 messages of 109 keys") == 2
        of_error = browser.get(found["ValueError 5 keys"]).text
        assert [name for name, _ in groups(of_error)] == ["days 3 keys", "more than a week 2 keys", "billing 5 keys"]
        assert "0 messages of 5 keys" in of_error
        assert ">c1</a>" not in of_error
        oldest = browser.get(f"{found['ValueError 5 keys']}&by=age").text
        assert re.findall(r">([vw]\d)</a>", oldest) == ["w2", "w1", "v3", "v2", "v1"]
        of_age = browser.get(dict(groups(of_error))["more than a week 2 keys"]).text
        assert re.findall(r">([vw]\d)</a>", of_age) == ["w1", "w2"]
        pages, path = [], "/parked?by=age"
        for _ in range(3):
            pages.append(browser.get(path).text)
            path = unescape("".join(re.findall(r'<a href="([^"]+)" rel="next">', pages[-1])))
        shown = [key for each in pages for key in re.findall(r">([cvw]\d+)</a>", each)]
        assert shown == ["w2", "w1", "v3", "v2", "v1", *(f"c{n}" for n in range(104, 0, -1))]
        node.connection.execute(PARKED, ("billing", "x", "1 min", "KeyError", AT_ONCE))
        assert f"0 messages of {AT_ONCE:,} keys, the longest parked of {AT_ONCE + 109:,}" in browser.get("/parked").text
        assert browser.get("/parked?age=x").status_code == 400


def test_how_many_there_are_is_said_beside_the_list_and_in_the_dialog(node: Node) -> None:
    node.inbox("shipping")
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, last_error) "
        "SELECT 'shipping', n::text, 1, 1, now() + interval '1 h', CASE WHEN n < 3 THEN 'A: 1' ELSE 'B: 2' END "
        "FROM generate_series(1, %s) AS n",
        [AT_ONCE + 2],
    )
    node.connection.execute(
        "INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, sent_at) "
        "SELECT CASE WHEN n < 3 THEN 'execute' ELSE 'deliver' END, 'Y', gen_random_uuid(), 't', 'k', 'M', 'U', now() "
        "FROM generate_series(1, %s) AS n",
        [AT_ONCE + 2],
    )
    said = re.compile(r'<span class="unit">([\d,]+ (?:keys|dead letters))</span>')
    with browsing(node.dsn) as browser:
        failing, of_error = browser.get("/failing").text, browser.get("/failing?error=A").text
        letters, of_stage = browser.get("/dead-letters").text, browser.get("/dead-letters?stage=execute").text
    all_of_them = f"{AT_ONCE + 2:,}"
    assert [said.findall(page) for page in (failing, of_error, letters, of_stage)] == [
        [f"{all_of_them} keys"], ["2 keys"], [f"{all_of_them} dead letters"], ["2 dead letters"]
    ]  # fmt: skip
    assert f'class="on">{AT_ONCE:,} keys, the next to be tried of {all_of_them}. Node' in failing
    assert of_error.count('class="on">2 keys. Node') == 1
    assert letters.count(f'class="on">{AT_ONCE:,} dead letters, the oldest of {all_of_them}. Node') == 2
    assert of_stage.count('class="on">2 dead letters. Node') == 2


def test_a_page_counts_no_more_messages_of_a_key_than_it_may(trouble: Trouble, browser: Client) -> None:
    connection = trouble.node.connection
    connection.execute(
        "INSERT INTO mailroom.parked "
        "(inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, sent_at, delivered_at) "
        "SELECT 'quiet', n, n, gen_random_uuid(), gen_random_uuid(), 'quiet', 'many', 'M', 'U', now(), now() "
        "FROM generate_series(1, %s) AS n",
        [KEY_MESSAGES + 1],
    )
    connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error) "
        "VALUES ('quiet', 'many', 1, 1, 'infinity', clock_timestamp(), 'X')"
    )
    try:
        assert "over 1,000" in browser.get("/parked", inbox="quiet").text
    finally:
        connection.execute("DELETE FROM mailroom.parked WHERE inbox = 'quiet'")
        connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet'")


@pytest.mark.slow
def test_who_may_only_read_is_shown_no_action(trouble: Trouble) -> None:
    with browsing(trouble.node.dsn, User("eve", READ_ONLY)) as client:
        for path in ("/parked", "/dead-letters", "/inboxes/shipping", "/waiting"):
            text = client.get(path).text
            assert "read-only" in text
            assert "/act/" not in text


def test_sessions_read_only_and_end_a_statement_after_two_seconds(trouble: Trouble, browser: Client) -> None:
    assert LIMITS_OF_THE_PRODUCT["statement_timeout"] == "2s"
    sessions = browser.made.state.sessions
    with sessions.reading() as connection:
        for name, value in (("statement_timeout", "1min"), ("default_transaction_read_only", "on")):
            assert connection.execute(f"SHOW {name}").fetchone() == (value,)
        with pytest.raises(Exception, match="read-only") as refused:
            connection.execute("DELETE FROM mailroom.audit")
        assert sqlstate(refused.value) == "25006"
    with sessions.operating() as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("1min",)
        assert connection.execute("SHOW transaction_read_only").fetchone() == ("off",)


def test_after_a_crash_what_waits_is_not_known_until_there_are_statistics(node: Node) -> None:
    waiting = re.compile(r"Waiting in inboxes</dt>\s*<dd><a [^>]+><span class=.number.>([^<]+)")
    node.inbox("shipping", "order.paid")
    node.inbox("empty")
    node.send("order.paid", key="k")
    node.deliver_all()
    node.connection.execute("ANALYZE mailroom.inbox_shipping")
    node.connection.execute("SELECT pg_stat_reset()")  # as a crash does, to this database
    with browsing(node.dsn) as browser:
        assert waiting.findall(browser.get("/").text) == ["?"]
        rows = re.findall(r'<td class="n">([^<]+) <span class="unit">messages?</span>', browser.get("/inboxes").text)
        assert sorted(rows) == ["0", "?"]
        node.connection.execute("VACUUM mailroom.inbox_shipping")
        eventually(lambda: waiting.findall(browser.get("/").text) == ["1"])


def test_a_server_that_ended_the_sessions_is_met_again(trouble: Trouble) -> None:
    with browsing(trouble.node.dsn) as client:
        assert client.get("/audit").status_code == 200
        for pid in trouble.node.sessions("mailroom dashboard"):
            trouble.node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        assert client.get("/audit").status_code == 200


def test_a_database_that_is_not_there_is_told(trouble: Trouble) -> None:
    with browsing("postgresql://mailroom@127.0.0.1:1/none") as client:
        answer = client.get("/audit")
        assert answer.status_code == 503
        assert "MR-connection-failed" in answer.text


def test_minutes_without_anything_have_no_bar() -> None:
    now = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)
    values = [(now - timedelta(minutes=2), 4.0), (now, 8.0)]
    drawn = str(charts.bars(values, now, 60, f"{SCRIPT} messages"))
    assert drawn.count("<rect") == 2
    assert SCRIPT not in drawn
    assert "12:00 UTC: 8 " in drawn
    assert '<div class="scale" aria-hidden="true">8 a minute</div>' in drawn
    assert "<span>11:01</span><span>11:30</span><span>12:00</span><span>UTC</span>" in drawn
    assert "<rect" not in str(charts.bars([], now, 60, "messages"))
    assert str(charts.lines([[1.0, 2.0], [0.0, 0.0]], [values[0][0], now], ("a", "b"), "x")).count("<polyline") == 2


@pytest.mark.slow
def test_below_a_path_of_another_app_all_stays_there(trouble: Trouble) -> None:
    made = app(trouble.node.dsn, auth=lambda _: ADA)
    client = Client(Starlette(routes=[Mount("/ops/mailroom", made)]))
    try:
        for path in ("/", "/inboxes/shipping", "/parked", "/dead-letters", "/message"):
            answer = client.get(f"/ops/mailroom{path}")
            assert answer.status_code == 200
            assert all(each.startswith(("/ops/mailroom/", "#")) for each in _Loads(answer.text).loads)
        assert {cookie.path for cookie in client.cookies.jar} == {"/ops/mailroom"}
        static = re.findall(r'src="(/ops/mailroom/static/[^"]+)"', answer.text)
        assert [client.get(each).status_code for each in static] == [200, 200, 200]
        form = forms(client.get("/ops/mailroom/inboxes/billing").text, "/ops/mailroom")["resume/inbox",]
        gone = client.post("/ops/mailroom/act/resume/inbox", **form, why="moving")
        assert gone.headers["location"] == "/ops/mailroom/inboxes/billing"
    finally:
        made.state.sessions.close()


def test_the_doctor_keeps_to_the_shorter_time_of_the_session(trouble: Trouble) -> None:
    connection = trouble.node.connection
    for given, kept in (("9s", "9s"), ("0", "10s")):
        with connection.transaction():
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [given])
            connection.execute(LOOK.at().sql)
            [(shown,)] = connection.execute("SELECT current_setting('statement_timeout')")
            assert shown == kept
