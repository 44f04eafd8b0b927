"""Each act of the dashboard is done by clicks in headless Chromium, page by page.

Each test holds alone, as those of `test_browser.py`. A test says which forms it sends (`does`), and is held to it.
"""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from inspect import isfunction
from typing import Any

import pytest
from starlette.routing import Route

from dispatcher.dashboard import app
from inbox import Inbox, Park
from mailroom import Bridges, bridges
from mailroom.sql.runner import run
from tests.dashboard import test_browser
from tests.dashboard.driving import LOOKS, act, does, find, looked_at, shows, text_of
from tests.dashboard.trouble import TICKS, Trouble
from tests.support.browser import needs_browser
from tests.support.node import Node, failing
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, needs_browser]


def done(node: Node, why: str) -> list[tuple[object, ...]]:
    """Return what was done for this reason, and to which key or thing."""
    return node.rows("SELECT action, key FROM mailroom.audit WHERE reason = %s ORDER BY id", why)


def test_each_act_is_done_by_a_test_in_a_browser() -> None:
    made = app("postgresql:///none", auth=lambda _: None)
    routes = [each for each in made.routes if isinstance(each, Route) and "POST" in (each.methods or ())]
    acts = {each.path for each in routes} - {"/{path:path}"}
    tests = [each for each in (*globals().values(), *vars(test_browser).values()) if isfunction(each)]
    assert set().union(*(getattr(each, "does", ()) for each in tests)) == acts
    assert len(acts) > 10


@does("/act/requeue/dead-letter", "/act/discard/dead-letter")
def test_dead_letters_are_requeued_and_discarded(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    number = node.value("SELECT count(*) FROM mailroom.dead_letter")  # other tests add some
    window.get(f"{at}/dead-letters")
    act(window, "Requeue", on="1 message")
    shows(window, "1 dead letter requeued.")
    node.deliver_all()
    window.get(f"{at}/dead-letters")
    shows(window, f"{number} dead letters")
    act(window, "Discard", sure=True, on="1 message")
    shows(window, "1 dead letter discarded.")
    left = f"{number - 1} dead letter" + ("" if number == 2 else "s")
    find(window, "[name=stage] option:nth-child(2)").click()
    find(window, ".filter button").click()
    act(window, "Requeue all shown by this filter", on=left)
    shows(window, f"{left} requeued.")
    node.deliver_all()
    window.get(f"{at}/dead-letters")
    act(window, "Discard all", sure=True, on=left)
    shows(window, f"{left} discarded.")
    shows(window, "There are no dead letters.")


FAILING = """
INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, last_error)
SELECT inbox, of || n, 1, 1, now() + interval '1 h',
       CASE of WHEN 'a' THEN E'Down\\nand out' ELSE 'Slow:' END || ' by hand'
FROM unnest('{quiet,billing}'::text[]) AS inbox, unnest('{a,b}'::text[]) AS of, generate_series(1, 3) AS n
"""


@does("/act/retry/inbox")
def test_failing_keys_are_tried_now(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    node.connection.execute(FAILING)
    try:
        window.get(f"{at}/failing?matching=by+hand&inbox=quiet")
        shows(window, "6 keys")
        act(window, "Try now", "the key")
        shows(window, "1 failing key will be tried at once.")
        act(window, "Try all now", "the error", on="2 keys")
        shows(window, "2 failing keys will be tried at once.")
        # An error of two lines, and then in all inboxes.
        window.get(f"{at}/failing?matching=by+hand")
        window.find_element("partial link text", "Down").click()
        shows(window, "3 keys")
        find(window, ".filter [name=inbox]").clear()
        find(window, ".filter button").click()
        shows(window, "6 keys")
        act(window, "Try all shown by this filter now", "the filter", on="3 keys")
        shows(window, "3 failing keys will be tried at once.")
        tried = node.rows("SELECT reason, inbox, key FROM mailroom.audit WHERE action = 'inbox retry' ORDER BY id")
        assert tried == [
            ("the key", "quiet", "a1"), ("the error", "quiet", "a2"), ("the error", "quiet", "a3"),
            *(("the filter", "billing", f"a{n}") for n in (1, 2, 3)),
        ]  # fmt: skip
    finally:
        node.connection.execute("DELETE FROM mailroom.key_state WHERE last_error LIKE '%by hand'")


@does("/act/pause/inbox", "/act/resume/inbox")
def test_an_inbox_is_paused_and_resumed_and_its_breaker_closed(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    node.connection.execute(
        "UPDATE mailroom.limits SET opened_at = now(), opened_why = 'down', try_at = now() + interval '1 h' "
        "WHERE inbox = 'billing'"
    )
    window.get(f"{at}/inboxes/billing")
    act(window, "Close breakers", "it is up")
    shows(window, "Inbox billing goes on.")
    assert node.value("SELECT opened_at FROM mailroom.limits WHERE inbox = 'billing'") is None
    act(window, "Pause", "it is up")
    shows(window, "Paused since")
    act(window, "Resume", "it is up")
    shows(window, "goes on.")
    assert [action for action, _ in done(node, "it is up")] == ["inbox resume", "inbox pause", "inbox resume"]


@does("/act/cancel/outbox", "/act/discard/parked", "/act/replay/archive")
def test_a_message_is_cancelled_and_one_that_was_discarded_is_replayed(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    undone = node.send("order.paid", key="undone")
    node.deliver_all()
    with node.connection.transaction():
        [first] = Inbox("shipping").peek(node.connection, "undone")
        run(node.connection, failing("shipping", first, Park("no such street")))
    window.get(f"{at}/inboxes/shipping/key?key=undone")
    act(window, "Discard", "by mistake", sure=True, on="1 message of key undone. Inbox shipping")
    shows(window, "1 message of 1 parked key discarded; 1 key no longer parked.")
    window.get(f"{at}/message/path?id={undone}")
    shows(window, "was discarded from inbox shipping")
    act(window, "Replay", "by mistake")
    shows(window, "1 message replayed into inbox shipping.")
    shows(window, "was discarded from inbox shipping")
    assert node.value("SELECT count(*) FROM mailroom.inbox WHERE inbox = 'shipping' AND key = 'undone'") == 1
    soon = datetime.now(UTC) + timedelta(minutes=30)
    unsent, scheduled = node.send("order.paid", key="unsent"), node.send("order.paid", key="soon", deliver_at=soon)
    window.get(f"{at}/message/path?id={unsent}")
    act(window, "Cancel", "by mistake")
    shows(window, f"Message {unsent} is cancelled.")
    node.deliver_all()
    window.get(f"{at}/waiting")
    act(window, "Cancel", "by mistake")  # the next due
    shows(window, f"Message {scheduled} is cancelled.")
    assert done(node, "by mistake") == [
        ("parked discard", "undone"), ("archive replay", "undone"), ("outbox cancel", "unsent"),
        ("outbox cancel", "soon"),
    ]  # fmt: skip


@does("/act/pause/periodic", "/act/resume/periodic", "/act/resume/bridge")
def test_periodic_messages_and_bridges_go_on(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    window.get(f"{at}/waiting")
    act(window, "Pause", "at night")
    shows(window, "nightly is paused.")
    act(window, "Resume", "at night")
    shows(window, "nightly goes on.")
    with node.connection.transaction():
        settings = bridges.OutSettings("nats", "nats://127.0.0.1:1", bridges.Form("shop.{topic}"))
        Bridges().out(node.connection, "shop", settings, topics=["shop.#"], actor="ada")
        node.connection.execute("UPDATE mailroom.bridge_out SET state = 'stopped', why = 'refused', since = now()")
    window.get(f"{at}/links")
    act(window, "Resume", "at night")
    shows(window, "Bridge shop is tried at once.")
    assert done(node, "at night") == [("periodic pause", "nightly"), ("periodic resume", "nightly"),
                                      ("bridge resume", "shop")]  # fmt: skip


# What is seen at the middle of an element is that element, or a part of it.
IS_SEEN = """
const each = [...document.querySelectorAll(arguments[0])].find(each => each.innerText.includes(arguments[1]));
each.scrollIntoView({block: "center"});
const place = each.getBoundingClientRect();
const seen = document.elementFromPoint(place.left + place.width / 2, place.top + place.height / 2);
return place.left >= 0 && place.right <= window.innerWidth && each.contains(seen);
"""


@does("/act/replay/parked", "/act/discard/parked")
def test_parked_keys_are_read_ticked_and_acted_on_at_each_width_and_in_both_themes(
    window: Any, at: str, trouble: Trouble, photograph: Callable[[str], None]
) -> None:
    node = trouble.node
    node.connection.execute(TICKS)
    left = 9
    try:
        for scheme, width in LOOKS:
            looked_at(window, scheme, width)
            window.get(f"{at}/parked")
            window.find_element("partial link text", "TimeoutError").click()
            shows(window, f"{left} keys")
            assert "carrier said <script>" not in text_of(window, "main")
            assert window.execute_script(IS_SEEN, "td.error", "TimeoutError"), width
            assert window.execute_script(IS_SEEN, "button.opens", "Discard"), width
            photograph(f"parked-{scheme}-{width}")
            # Nothing is ticked yet, and then two are: the page stays as it is.
            assert not find(window, "[popovertarget=ticked]").is_enabled()
            for each in window.find_elements("css selector", ".pick")[:2]:
                each.click()
            assert text_of(window, "#refresh-state") == "paused while keys are ticked"
            find(window, "[popovertarget=ticked]").click()
            eventually(lambda: text_of(window, "#ticked .ticked") == "2 keys with 0 messages")
            photograph(f"ticked-{scheme}-{width}")
            find(window, "#ticked [name=why]").send_keys("by ticks")
            if scheme == "light":
                find(window, "#ticked .primary").click()
                shows(window, "0 messages of 2 parked keys replayed.")
            else:
                find(window, "#ticked [type=submit].danger").click()  # which the browser refuses without a tick
                find(window, "#ticked [name=sure]").click()
                find(window, "#ticked [type=submit].danger").click()
                shows(window, "2 keys no longer parked.")
            left -= 2
        # And the last one by the filter that the click has chosen.
        act(window, "Replay all shown by this filter", "by ticks", on="0 messages of 1 key")
        shows(window, "0 messages of 1 parked key replayed.")
        assert Counter(action for action, _ in done(node, "by ticks")) == {"parked discard": 4, "parked replay": 5}
    finally:
        node.connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet' AND key <> ''")
        window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# A browser changes the ends of lines in what a form holds, and each of these has another key beside it.
ODD_KEYS = ("a\nb", "a\r\nb", "  a+b %0A%41&key=c \"'<b>&amp; ")
PARKED_ODD = """
INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error)
SELECT 'quiet', key, 1, 1, 'infinity', now(), E'no\nstreet\r\nthere' FROM unnest(%s::text[]) AS key
"""


@does("/act/pause/inbox", "/act/replay/parked", "/act/discard/parked")
def test_an_act_reaches_the_key_that_it_is_meant_for_whatever_its_text(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    keys = sorted(ODD_KEYS)
    window.set_window_size(1280, 1000)
    try:
        node.connection.execute(PARKED_ODD, [keys])
        for nth, key in enumerate(keys):
            window.get(f"{at}/parked?inbox=quiet")
            window.find_elements("css selector", "th .key")[nth].click()
            eventually(lambda: "/key?key=" in window.current_url)
            act(window, "Pause", f"the key {nth}")
            shows(window, "is paused.")
            window.get(f"{at}/parked?inbox=quiet")
            act(window, "Replay", f"the key {nth}", nth=nth)
            shows(window, "of 1 parked key replayed.")
            assert done(node, f"the key {nth}") == [("inbox pause", key), ("parked replay", key)]
            node.connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet' AND key <> ''")
            node.connection.execute(PARKED_ODD, [keys])
        # Of an error of more than one line, with another filter typed beside it.
        window.get(f"{at}/parked?inbox=quiet")
        find(window, ".chip").click()
        find(window, ".filter [name=matching]").send_keys("there")
        find(window, ".filter button").click()
        shows(window, f"{len(keys)} keys")
        act(window, "Discard all shown by this filter", "the error", sure=True)
        shows(window, f"{len(keys)} keys no longer parked.")
        assert sorted(done(node, "the error")) == [("parked discard", key) for key in keys]
        node.connection.execute(PARKED_ODD, [keys])
        window.get(f"{at}/parked?inbox=quiet")
        find(window, ".pick-all").click()
        find(window, "[popovertarget=ticked]").click()
        find(window, "#ticked [name=why]").send_keys("the ticks")
        find(window, "#ticked .primary").click()
        shows(window, f"of {len(keys)} parked keys replayed.")
        assert sorted(done(node, "the ticks")) == [("parked replay", key) for key in keys]
    finally:
        node.connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet' AND key <> ''")
