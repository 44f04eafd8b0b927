"""The dashboard in headless Chromium: every page is drawn, and acts are done by clicks.

Each test holds alone, since the processes of a run share the tests of a file, and each process has a node of its own.

Screenshots are taken if $MAILROOM_ARTEFACTS names a folder for them: each takes as long as its page.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from dispatcher.dashboard import ProxyHeader, app
from tests.dashboard.proxied import HEADER, proxied, served
from tests.dashboard.test_cli_dashboard import running
from tests.dashboard.test_pages import SHOWS
from tests.dashboard.trouble import KEY, Trouble
from tests.support.browser import browser, needs_browser
from tests.support.node import Node
from tests.support.waiting import eventually

exceptions = pytest.importorskip("selenium.common.exceptions")

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def at(trouble: Trouble) -> Iterator[str]:
    with running(trouble.node.dsn) as (_, address):
        yield address


@pytest.fixture(scope="module")
def photograph(window: Any) -> Callable[[str], None]:
    """Give what takes a screenshot, if anybody wants them."""
    if not (wanted := os.environ.get("MAILROOM_ARTEFACTS")):
        return lambda name: None
    home = Path(wanted) / "mailroom-dashboard"
    home.mkdir(parents=True, exist_ok=True)
    return lambda name: window.save_screenshot(str(home / f"{name}.png"))


@pytest.fixture(scope="module")
def window(at: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("chromium")) as window:
        yield window


def find(window: Any, selector: str) -> Any:
    return window.find_element("css selector", selector)


def text_of(window: Any, selector: str) -> str:
    # In one step, since the page may be replaced between two.
    return str(window.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def shows(window: Any, text: str) -> None:
    eventually(lambda: text in text_of(window, "main"))


def _opened(window: Any, label: str, nth: int) -> Any:
    try:
        opens = [each for each in window.find_elements("css selector", ".opens") if each.text == f"{label}…"][nth]
        form = find(window, f"#{opens.get_attribute('popovertarget')}")
        if not form.is_displayed():
            opens.click()
        return form if form.is_displayed() else None
    except exceptions.StaleElementReferenceException:  # the page has refreshed itself meanwhile
        return None


def act(window: Any, label: str, why: str = "by clicks", *, sure: bool = False, nth: int = 0) -> None:
    """Open the first form of that label, or the `nth` after it, say why, and send it."""
    form = eventually(lambda: _opened(window, label, nth))
    form.find_element("css selector", "input[name=why]").send_keys(why)
    if sure:
        form.find_element("css selector", "input[name=sure]").click()
    form.find_element("css selector", "button[type=submit]").click()


def test_every_page_is_drawn_and_nothing_is_refused_or_loaded_from_elsewhere(
    window: Any, at: str, photograph: Callable[[str], None]
) -> None:
    window.get_log("browser")  # of other tests, which are refused what they should be
    paths = [*SHOWS, f"/inboxes/shipping/key?key={KEY.replace('<', '%3C').replace('>', '%3E')}"]
    for scheme, width in (("light", 1280), ("dark", 400)):
        window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
            {"name": "prefers-color-scheme", "value": scheme}]})  # fmt: skip
        window.set_window_size(width, 1000)
        for number, path in enumerate(paths):
            window.get(at + path)
            if path == "/doctor":
                shows(window, "What helps")  # htmx has fetched the findings
            photograph(f"{scheme}-{width}-{number:02}")
            # Only tables scroll to the side, and the page does not.
            wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            assert window.execute_script(wide), path
    assert not [each for each in window.get_log("browser") if each["level"] == "SEVERE"]
    urls = window.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert urls
    assert all(each.startswith(at + "/") for each in urls)


def test_acts_are_done_by_clicks(window: Any, at: str, trouble: Trouble, photograph: Callable[[str], None]) -> None:
    node = trouble.node
    letters = node.value("SELECT count(*) FROM mailroom.dead_letter")  # other tests add some
    window.set_window_size(1280, 1000)
    window.get(f"{at}/parked")
    act(window, "Replay all")
    shows(window, "replayed.")
    assert node.value("SELECT count(*) FROM mailroom.parked") == 0
    window.get(f"{at}/dead-letters")
    act(window, "Requeue all")
    shows(window, f"{letters} dead letters requeued.")
    node.deliver_all()
    window.get(f"{at}/dead-letters")
    photograph("requeued")
    act(window, "Discard all", sure=True)
    shows(window, f"{letters} dead letters discarded.")
    shows(window, "There are no dead letters.")
    window.get(f"{at}/inboxes/shipping")
    act(window, "Pause")
    shows(window, "Paused since")
    photograph("paused")
    act(window, "Resume")
    shows(window, "goes on.")
    done = node.rows("SELECT action, reason FROM mailroom.audit WHERE reason = 'by clicks' ORDER BY id")
    assert [action for action, _ in done] == [
        "parked replay", "dead-letter requeue", "dead-letter discard", "inbox pause", "inbox resume"
    ]  # fmt: skip


LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1400, 390)]


def looked_at(window: Any, scheme: str, width: int) -> None:
    """Have the window look like that. A phone is narrower than any window may be."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


# What is seen at the middle of an element is that element, or a part of it.
IS_SEEN = """
const each = [...document.querySelectorAll(arguments[0])].find(each => each.innerText.includes(arguments[1]));
each.scrollIntoView({block: "center"});
const place = each.getBoundingClientRect();
const seen = document.elementFromPoint(place.left + place.width / 2, place.top + place.height / 2);
return place.left >= 0 && place.right <= window.innerWidth && each.contains(seen);
"""
PARKED = """
INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error)
SELECT 'quiet', 'tick/' || n, 1, 1, 'infinity', now(), 'TimeoutError: no answer for 30 s' || repeat('!', 90)
FROM generate_series(1, 9) AS n
"""


def test_parked_keys_are_read_ticked_and_acted_on_at_each_width_and_in_both_themes(
    window: Any, at: str, trouble: Trouble, photograph: Callable[[str], None]
) -> None:
    node = trouble.node
    node.connection.execute(PARKED)
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
        done = node.rows("SELECT action, count(*) FROM mailroom.audit WHERE reason = 'by ticks' GROUP BY 1 ORDER BY 1")
        assert done == [("parked discard", 4), ("parked replay", 4)]
    finally:
        node.connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet' AND key <> ''")
        window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# A browser changes the ends of lines in what a form holds, and each of these has another key beside it.
ODD_KEYS = ("a\nb", "a\r\nb", "  a+b %0A%41&key=c ", "a\"'<b>&amp;")
PARKED_ODD = """
INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error)
SELECT 'quiet', key, 1, 1, 'infinity', now(), E'no\nstreet\r\nthere' FROM unnest(%s::text[]) AS key
"""


def test_an_act_reaches_the_key_that_it_is_meant_for_whatever_its_text(window: Any, at: str, trouble: Trouble) -> None:
    node = trouble.node
    keys = sorted(ODD_KEYS)
    window.set_window_size(1280, 1000)
    try:
        node.connection.execute(PARKED_ODD, [keys])
        for nth, key in enumerate(keys):
            window.get(f"{at}/parked?inbox=quiet")
            window.find_elements("css selector", "th .key")[nth].click()
            act(window, "Pause", f"the key {nth}")
            shows(window, "is paused.")
            act(window, "Resume", f"the key {nth}")
            shows(window, "goes on.")
            window.get(f"{at}/parked?inbox=quiet")
            act(window, "Replay", f"the key {nth}", nth=nth)
            shows(window, "of 1 parked key replayed.")
            done = node.rows("SELECT action, key FROM mailroom.audit WHERE reason = %s ORDER BY id", f"the key {nth}")
            assert done == [("inbox pause", key), ("inbox resume", key), ("parked replay", key)]
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
        done = node.rows("SELECT action, key FROM mailroom.audit WHERE reason = 'the error' ORDER BY key")
        assert done == [("parked discard", key) for key in keys]
        node.connection.execute(PARKED_ODD, [keys])
        window.get(f"{at}/parked?inbox=quiet")
        find(window, ".pick-all").click()
        find(window, "[popovertarget=ticked]").click()
        find(window, "#ticked [name=why]").send_keys("the ticks")
        find(window, "#ticked .primary").click()
        shows(window, f"of {len(keys)} parked keys replayed.")
        done = node.rows("SELECT action, key FROM mailroom.audit WHERE reason = 'the ticks' ORDER BY key")
        assert done == [("parked replay", key) for key in keys]
    finally:
        node.connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet' AND key <> ''")


def test_a_page_refreshes_by_itself_but_not_under_a_form_that_is_open(window: Any, at: str, trouble: Trouble) -> None:
    window.get(f"{at}/dead-letters")
    assert "key-of-late" not in text_of(window, "main")
    trouble.node.send("nobody.wants", key="key-of-late")
    trouble.node.deliver_all()
    shows(window, "key-of-late")
    window.execute_script("document.querySelector('.opens').click()")
    eventually(lambda: text_of(window, "#refresh-state") == "paused while you type")
    looked = "return document.querySelector('#live').getAttribute('data-seen')"
    window.execute_script("document.querySelector('#live').setAttribute('data-seen', '1')")
    # It would be refreshed now, were the form not open.
    window.execute_script("htmx.trigger('#live', 'look')")
    assert window.execute_script(looked) == "1"
    find(window, ".act form:popover-open .quiet").click()
    window.execute_script("htmx.trigger('#live', 'look')")
    eventually(lambda: window.execute_script(looked) is None)


def test_a_form_that_is_opened_while_the_page_refreshes_stays(window: Any, at: str) -> None:
    window.get(f"{at}/inboxes/shipping")
    eventually(lambda: window.execute_script("return Boolean(window.htmx && document.querySelector('.act form'))"))
    window.execute_script(
        "window.answered = false; "
        "document.addEventListener('htmx:afterRequest', () => setTimeout(() => { window.answered = true }, 100)); "
        "htmx.trigger('#live', 'look'); document.querySelector('.act form').showPopover()"
    )
    eventually(lambda: window.execute_script("return window.answered"))
    assert window.execute_script("return document.querySelectorAll('.act form:popover-open').length") == 1


def test_a_script_in_a_key_or_an_error_does_not_run(window: Any, at: str) -> None:
    """An alert would make the next command fail."""
    for path in ("/", "/inboxes/billing", "/dead-letters"):
        window.get(at + path)
        assert window.title.endswith("Mailroom")


# -- Who may use it ---------------------------------------------------------------------------------------------------

POST = """
const [path, fields, done] = arguments;
const csrf = document.querySelector("[name=csrf]")?.value ?? "";
fetch(path, {method: "POST", body: new URLSearchParams({csrf, why: "evil", ...fields}), redirect: "manual"})
    .then(async answer => done([answer.status, await answer.text()]));
"""
TOKENS = {"ada": ("everything", "a" * 32), "bob": ("replay", "b" * 32), "wall": ("read-only", "w" * 32)}


def posted(window: Any, path: str, **fields: str) -> tuple[int, str]:
    """Have the page's own script send a form that the page does not show, with the token of one that it shows."""
    status, text = window.execute_async_script(POST, path, fields)
    return status, text


def audited(node: Node) -> list[tuple[object, ...]]:
    return node.rows("SELECT actor, action, inbox, reason FROM mailroom.audit ORDER BY id")


def test_behind_a_proxy_users_are_those_that_it_names_and_do_no_more_than_they_may(
    window: Any, at: str, trouble: Trouble
) -> None:
    before = len(audited(trouble.node))
    window.delete_all_cookies()
    with proxied(at, "ada@example.org") as through:  # without --auth everybody would be a user of this machine
        window.get(f"{through}/inboxes/shipping")
        assert "not known here" in text_of(window, "body")
    arguments = "--auth", f"header:{HEADER}", "--may", "pause"
    with running(trouble.node.dsn, *arguments) as (_, behind), proxied(behind, "ada@example.org") as through:
        window.get(f"{behind}/inboxes/shipping")  # past the proxy
        assert "not known here" in text_of(window, "body")
        window.get(f"{through}/inboxes/shipping")
        assert text_of(window, ".who .name") == "ada@example.org"
        status, text = posted(window, "/act/resume/inbox", inbox="quiet")
        assert status == 403
        assert "ada@example.org may not resume here." in text
        act(window, "Pause", "through a proxy")
        shows(window, "Inbox shipping is paused.")
        assert not window.find_elements("css selector", "main .opens")  # to resume it is not theirs
    assert audited(trouble.node)[before:] == [("ada@example.org", "inbox pause", "shipping", "through a proxy")]
    trouble.node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = NULL, paused_by = NULL "
                                    "WHERE name = 'shipping'")  # fmt: skip


def test_who_logs_in_with_a_token_does_what_its_line_says_and_who_may_only_read_does_nothing(
    window: Any, trouble: Trouble, tmp_path: Path
) -> None:
    node = trouble.node
    (file := tmp_path / "tokens").write_text(
        "".join(f"{name} {may} {token}\n" for name, (may, token) in TOKENS.items())
    )
    node.connection.execute(PARKED)
    before = audited(node)

    def log_in(name: str) -> None:
        window.get(f"{through}/parked")
        find(window, "[name=token]").send_keys(TOKENS[name][1])
        find(window, ".login button").click()
        eventually(lambda: text_of(window, ".who .name") == name)
        window.get(f"{through}/parked")
        shows(window, "TimeoutError")

    def log_out() -> None:
        find(window, "[action$=logout] button").click()
        shows(window, "Log in")

    try:
        window.delete_all_cookies()
        with running(node.dsn, "--auth", f"tokens:{file}") as (_, own), proxied(own) as through:
            window.get(f"{through}/parked")
            find(window, "[name=token]").send_keys("x" * 32)
            find(window, ".login button").click()
            shows(window, "This token is not known.")
            log_in("bob")
            assert not window.find_elements("css selector", ".danger")
            status, text = posted(window, "/act/discard/parked", inbox="quiet", key="tick/1", sure="1")
            assert (status, "bob may not discard here." in text) == (403, True)
            log_out()
            log_in("wall")
            assert "read-only" in text_of(window, ".who")
            assert not window.find_elements("css selector", ".opens, .pick")
            assert posted(window, "/act/replay/parked", inbox="quiet", key="tick/1")[0] == 403
            assert audited(node) == before
            log_out()
            log_in("ada")
            window.get(f"{through}/parked?inbox=quiet")
            act(window, "Replay", "by a token")
            shows(window, "replayed.")
            assert audited(node)[len(before) :][0][::3] == ("ada", "by a token")
    finally:
        node.connection.execute("DELETE FROM mailroom.key_state WHERE inbox = 'quiet' AND key <> ''")


def test_below_a_path_of_another_app_behind_a_proxy_it_is_drawn_refreshed_and_acted_on(
    window: Any, trouble: Trouble
) -> None:
    made = app(trouble.node.dsn, auth=ProxyHeader(HEADER, ["127.0.0.1"], {"pause", "resume"}))
    window.delete_all_cookies()
    try:
        with served(Starlette(routes=[Mount("/ops/mailroom", made)])) as address, proxied(address, "ada") as through:
            window.get(f"{through}/ops/mailroom/inboxes/billing")
            act(window, "Pause", "below a path")
            shows(window, "Inbox billing is paused.")
            window.execute_script("document.querySelector('#live').setAttribute('data-seen', '1')")
            window.execute_script("htmx.trigger('#live', 'look')")
            eventually(lambda: window.execute_script("return !document.querySelector('#live[data-seen]')"))
            act(window, "Resume", "below a path")
            shows(window, "Inbox billing goes on.")
            assert window.current_url == f"{through}/ops/mailroom/inboxes/billing"
            urls = window.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
            assert all(each.startswith(f"{through}/ops/mailroom/") for each in urls)
    finally:
        made.state.sessions.close()
    assert [each[1] for each in audited(trouble.node) if each[3] == "below a path"] == ["inbox pause", "inbox resume"]
