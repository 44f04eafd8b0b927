"""The dashboard in headless Chromium: every page is drawn and can be used, as it refreshes, and by whoever may.

Each test holds alone, since the processes of a run share the tests of a file, and each process has a node of its own.

Screenshots are taken if $MAILROOM_ARTEFACTS names a folder for them: each takes as long as its page.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route, compile_path

from dispatcher.dashboard import ProxyHeader, Tokens, app
from tests.dashboard.driving import LOOKS, act, does, find, looked_at, shows, text_of
from tests.dashboard.proxied import HEADER, proxied, served
from tests.dashboard.serving import running
from tests.dashboard.test_pages import PATHS, SHOWS
from tests.dashboard.trouble import KEY, TICKS, Trouble
from tests.support.browser import needs_browser
from tests.support.node import Node
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, needs_browser]

# What is wrong with a page as it looks now. Only tables scroll to the side, and the page does not. What can be clicked
# is seen once it is scrolled to: at its middle is that element, or a part of it. A text stands out from what is behind
# it by 4.5 to 1, or by 3 to 1 if it is large (WCAG 2, 1.4.3). A dialog fits into the window.
WRONG = """
const wrong = [], root = document.documentElement;
const told = each => `${each.tagName} ${(each.innerText || each.name || each.id).trim().slice(0, 40)}`;
const isShown = each => each.checkVisibility({opacityProperty: true, visibilityProperty: true})
    && !each.closest(".hidden, .skip");
if (root.scrollWidth > root.clientWidth) wrong.push(`the page is ${root.scrollWidth} wide`);

const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
const parsed = new Map();
function rgba(color) {
  if (!parsed.has(color)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    parsed.set(color, [...canvas.getImageData(0, 0, 1, 1).data]);
  }
  return parsed.get(color);
}
const over = ([r, g, b, a], under) => [r, g, b].map((each, n) => (each * a + under[n] * (255 - a)) / 255);
function behind(each) {
  const layers = [];
  for (; each; each = each.parentElement) layers.push(rgba(getComputedStyle(each).backgroundColor));
  return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
}
const light = color => color.map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, n) => sum + each * [0.2126, 0.7152, 0.0722][n], 0);
function contrast(each) {
  const ground = behind(each), [most, least] = [light(over(rgba(getComputedStyle(each).color), ground)), light(ground)]
      .sort((one, other) => other - one);
  return (most + 0.05) / (least + 0.05);
}
for (const each of document.body.querySelectorAll("*")) {
  const says = [...each.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!says || !isShown(each) || each.closest(":disabled, svg")) continue;
  const style = getComputedStyle(each), size = parseFloat(style.fontSize);
  const needs = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
  if (contrast(each) < needs) wrong.push(`${told(each)}: contrast ${contrast(each).toFixed(2)}`);
}

for (const each of document.querySelectorAll("a[href], button, input:not([type=hidden]), select")) {
  if (!isShown(each)) continue;
  each.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
  const place = each.getClientRects()[0];
  const seen = document.elementFromPoint(place.left + place.width / 2, place.top + place.height / 2);
  if (!each.contains(seen)) wrong.push(`${told(each)}: is not seen`);
}

for (const form of document.querySelectorAll("form[popover]")) {
  form.showPopover();
  const place = form.getBoundingClientRect();
  if (place.left < 0 || place.right > innerWidth || place.top < 0 || place.bottom > innerHeight) {
    wrong.push(`${told(form)}: does not fit`);
  }
  form.hidePopover();
}
scrollTo(0, 0);
return wrong;
"""


def test_every_page_can_be_read_and_used_at_each_width_and_in_both_themes(
    window: Any, at: str, trouble: Trouble, tmp_path: Path, photograph: Callable[[str], None]
) -> None:
    """And nothing of it is refused, or loaded from elsewhere."""
    window.get_log("browser")  # of other tests, which are refused what they should be
    (file := tmp_path / "tokens").write_text(f"ada everything {'a' * 32}\n")
    made = app(trouble.node.dsn, auth=Tokens(file))
    odd = KEY.replace("<", "%3C").replace(">", "%3E")
    paths = [*SHOWS, f"/inboxes/shipping/key?key={odd}", f"/inboxes/billing/key?key={odd}"]
    paths += [f"/message/path?id={getattr(trouble, which)}" for which in PATHS]
    paths += [f"/message?id={trouble.parked}", "/login"]
    pages = {each.path for each in made.routes if isinstance(each, Route) and "GET" in (each.methods or ())}
    pages -= {"/static/{name}", "/{path:path}"}
    visited = [path.partition("?")[0] for path in paths]
    assert [page for page in pages if not any(compile_path(page)[0].match(path) for path in visited)] == []
    wrong = {}
    try:
        with served(made) as guarded:
            for number, path in enumerate(paths):
                window.get((guarded if path == "/login" else at) + path)
                if path == "/doctor":
                    shows(window, "What helps")  # htmx has fetched the findings
                for scheme, width in LOOKS:
                    looked_at(window, scheme, width)
                    photograph(f"{number:02}-{scheme}-{width}")
                    if found := window.execute_script(WRONG):
                        wrong[path, scheme, width] = found
                if path != "/login":
                    urls = window.execute_script("return performance.getEntriesByType('resource').map(of => of.name)")
                    assert urls
                    assert all(each.startswith(at + "/") for each in urls)
    finally:
        made.state.sessions.close()
        window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wrong == {}
    assert not [each for each in window.get_log("browser") if each["level"] == "SEVERE"]


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


@does("/login", "/logout", "/act/replay/parked")
def test_who_logs_in_with_a_token_does_what_its_line_says_and_who_may_only_read_does_nothing(
    window: Any, trouble: Trouble, tmp_path: Path
) -> None:
    node = trouble.node
    (file := tmp_path / "tokens").write_text(
        "".join(f"{name} {may} {token}\n" for name, (may, token) in TOKENS.items())
    )
    node.connection.execute(TICKS)
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
