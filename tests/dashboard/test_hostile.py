"""Hostile requests are refused, and change nothing: each of them would change something if it were not."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from dispatcher.dashboard import EVERYTHING, READ_ONLY, ProxyHeader, Tokens, User, app
from dispatcher.dashboard.access import Local, rights, user_of
from dispatcher.dashboard.forms import MOST_BYTES, MOST_FIELDS
from dispatcher.dashboard.guard import BROWSER, LOGIN, Browsers, Signer
from mailroom.errors import ConfigurationError, InvalidMessage
from tests.dashboard.conftest import ORIGIN, Client, browsing, forms
from tests.dashboard.trouble import Trouble

TOKEN, OTHER = "t" * 32, "o" * 32
FORM = {"origin": ORIGIN, "content-type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def csrf(browser: Client) -> str:
    return forms(browser.get("/inboxes/shipping").text)["pause/inbox",]["csrf"]


@pytest.fixture(autouse=True)
def _nothing_is_changed(trouble: Trouble) -> Iterator[None]:
    count = "SELECT count(*), max(id) FROM mailroom.audit"
    before = trouble.node.rows(count)
    yield
    assert trouble.node.rows(count) == before


PAUSE = {"inbox": "shipping", "why": "evil"}
HOSTILE: dict[str, tuple[int, str, str, Mapping[str, str], Mapping[str, Any]]] = {
    "another origin": (403, "POST", "/act/pause/inbox", {"origin": "https://evil.example"}, {}),
    "another port of this machine": (403, "POST", "/act/pause/inbox", {"origin": "http://127.0.0.1:9999"}, {}),
    "an origin that begins like ours": (403, "POST", "/act/pause/inbox", {"origin": f"{ORIGIN}.evil.example"}, {}),
    "an origin with our address as its user": (
        403, "POST", "/act/pause/inbox", {"origin": "http://127.0.0.1:8466@evil.example"}, {}),
    "the origin null": (403, "POST", "/act/pause/inbox", {"origin": "null"}, {}),
    "no origin": (403, "POST", "/act/pause/inbox", {}, {}),
    "a broken origin": (403, "POST", "/act/pause/inbox", {"origin": "http://[::"}, {}),
    "a fetch from another site": (403, "POST", "/act/pause/inbox", {**FORM, "sec-fetch-site": "cross-site"}, {}),
    "a fetch from a sister site": (403, "POST", "/act/pause/inbox", {**FORM, "sec-fetch-site": "same-site"}, {}),
    "another host": (421, "POST", "/act/pause/inbox", {**FORM, "host": "evil.example"}, {}),
    "a host that is made to lead here": (
        421, "POST", "/act/pause/inbox", {"origin": "http://evil.example:8466", "host": "evil.example:8466"}, {}),
    "reading by another host": (421, "GET", "/", {"host": "evil.example:8466"}, {}),
    "a host that ends like ours": (421, "GET", "/", {"host": "evil.localhost"}, {}),
    "JSON": (415, "POST", "/act/pause/inbox", {"origin": ORIGIN, "content-type": "application/json"}, {}),
    "a form of another kind": (415, "POST", "/act/pause/inbox", {"origin": ORIGIN, "content-type": "text/plain"}, {}),
    "a form that is too large": (413, "POST", "/act/pause/inbox", FORM, {"more": "x" * MOST_BYTES}),
    "too many fields": (400, "POST", "/act/pause/inbox", FORM, {f"f{n}": "1" for n in range(MOST_FIELDS)}),
    "a field given twice": (400, "POST", "/act/pause/inbox", FORM, {"inbox": ["shipping", "billing"]}),
    "a field given twice, once by the page": (400, "POST", "/act/pause/inbox", FORM, {"packed": "inbox=billing"}),
    "a field that is packed twice": (400, "POST", "/act/pause/inbox", FORM, {"packed": "key=a&key=b"}),
    "a page that is asked for with a broken field": (400, "GET", "/parked?packed=%25zz", {}, {}),
    "a page that is asked for with a NUL": (400, "GET", "/parked?matching=%00", {}, {}),
    "a path with a NUL": (400, "GET", "/inboxes/a%00", {}, {}),
    "a form with a NUL": (400, "POST", "/act/pause/inbox", FORM, {"packed": "key=a%00"}),
    "a GET that would change something": (404, "GET", "/act/pause/inbox?inbox=shipping&why=x", {}, {}),
    "PUT": (405, "PUT", "/act/pause/inbox", FORM, {}),
    "DELETE": (405, "DELETE", "/inboxes/shipping", FORM, {}),
    "an action that is none": (404, "POST", "/act/drop/inbox", FORM, {}),
    "an action on what it is not for": (404, "POST", "/act/cancel/inbox", FORM, {}),
    "a path out of the pages": (404, "POST", "/act/pause/inbox/../../audit", FORM, {}),
}  # fmt: skip


def test_refused(browser: Client, csrf: str) -> None:
    wrong = {}
    for name, (status, method, path, headers, more) in HOSTILE.items():
        given = {**PAUSE, "csrf": csrf, **more} if method == "POST" else None
        answer = browser.request(method, path, headers, data=given)
        if answer.status_code != status or "content-security-policy" not in answer.headers:
            wrong[name] = answer
    assert wrong == {}


def test_the_same_request_is_not_refused_from_our_own_page(browser: Client, csrf: str) -> None:
    """What is refused above is refused for the reason that is named there."""
    answer = browser.post("/act/pause/inbox", csrf=csrf, inbox="nobody", why="x")
    assert answer.status_code == 404
    assert "MR-unknown-inbox" in answer.text


def test_a_form_without_the_token_of_this_browser(browser: Client) -> None:
    for given in ("", "0" * 64, None, "é"):
        fields = PAUSE if given is None else PAUSE | {"csrf": given}
        assert browser.post("/act/pause/inbox", **fields).status_code == 403, given


def test_a_form_that_another_browser_or_user_was_given(trouble: Trouble, browser: Client, csrf: str) -> None:
    with browsing(trouble.node.dsn) as other:
        other.get("/audit")
        assert other.post("/act/pause/inbox", **PAUSE, csrf=csrf).status_code == 403
    users = iter([User("ada", EVERYTHING), User("eve", EVERYTHING)])
    client = Client(app(trouble.node.dsn, auth=lambda _: next(users)))
    try:
        of_ada = forms(client.get("/inboxes/shipping").text)["pause/inbox",]["csrf"]
        assert client.post("/act/pause/inbox", **PAUSE, csrf=of_ada).status_code == 403
    finally:
        client.close()


@pytest.mark.slow
def test_a_cookie_that_is_not_ours(trouble: Trouble, csrf: str) -> None:
    forged = Signer(b"e" * 32).signed(BROWSER, "0" * 32)
    with browsing(trouble.node.dsn) as client:
        client.cookies.set(BROWSER, forged, domain="127.0.0.1")
        assert client.post("/act/pause/inbox", **PAUSE, csrf=csrf).status_code == 403


def test_a_user_who_may_only_read(trouble: Trouble) -> None:
    with browsing(trouble.node.dsn, User("eve", READ_ONLY)) as client:
        # No page of hers has the token of forms, so it is made here.
        assert "csrf" not in client.get("/inboxes/shipping").text
        browsers = Browsers(client.made.state.signer)
        number = client.made.state.signer.read(BROWSER, client.cookies[BROWSER])
        csrf = browsers.token(number, User("eve"))
        for act in ("pause/inbox", "resume/inbox", "replay/parked", "discard/dead-letter", "cancel/outbox"):
            answer = client.post(f"/act/{act}", **PAUSE, csrf=csrf)
            assert answer.status_code == 403
            assert "eve may not" in answer.text


def test_nobody_that_is_known(trouble: Trouble) -> None:
    with browsing(trouble.node.dsn, None) as client:
        for path in ("/", "/audit", "/message/path?id=0", "/nothing"):
            answer = client.get(path)
            assert answer.status_code == 403
            assert "shipping" not in answer.text
        assert client.post("/act/pause/inbox", **PAUSE).status_code == 403


# -- Tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    file = tmp_path / "tokens"
    file.write_text(f"# who may\nada everything {TOKEN}\n\nbob replay,requeue {OTHER}\n")
    return Tokens(file)


@pytest.fixture
def guarded(trouble: Trouble, tokens: Tokens) -> Iterator[Client]:
    client = Client(app(trouble.node.dsn, auth=tokens))
    yield client
    client.close()


def test_without_a_token_there_is_a_page_to_give_it(guarded: Client) -> None:
    answer = guarded.get("/audit")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert guarded.post("/act/pause/inbox", **PAUSE).status_code == 401
    page = guarded.get("/login").text
    assert 'type="password"' in page
    assert "shipping" not in page


def test_a_wrong_token(guarded: Client) -> None:
    for wrong in ("", "x", TOKEN[:-1], TOKEN + "x", "é" * 20):
        headers = {"authorization": f"Bearer {wrong}".encode()}
        assert guarded.request("GET", "/audit", headers).status_code == 401, wrong  # type: ignore[arg-type]
        assert guarded.post("/login", token=wrong).status_code == 401, wrong
        assert LOGIN not in guarded.cookies
        assert guarded.get("/audit").status_code == 303


def test_a_token_lets_its_user_in_until_the_log_out(guarded: Client) -> None:
    assert guarded.post("/login", "https://evil.example", token=TOKEN).status_code == 403
    answer = guarded.post("/login", token=TOKEN)
    assert answer.status_code == 303
    for flag in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert flag in answer.headers["set-cookie"]
    assert TOKEN not in answer.headers["set-cookie"]
    page = guarded.get("/audit")
    assert page.status_code == 200
    assert ">ada<" in page.text
    copy = guarded.cookies[LOGIN]
    assert guarded.post("/logout").status_code == 303
    assert guarded.get("/audit").status_code == 303
    guarded.cookies.set(LOGIN, copy, domain="127.0.0.1")
    assert guarded.get("/audit").status_code == 303


def test_a_login_ends_with_its_token_where_the_secret_stays(trouble: Trouble, tmp_path: Path) -> None:
    cookies, answers = None, []
    for token in (TOKEN, TOKEN, OTHER):
        (file := tmp_path / "tokens").write_text(f"ada everything {token}\n")
        with closing(Client(app(trouble.node.dsn, auth=Tokens(file), secret=b"s" * 32))) as client:
            if cookies is None:
                client.post("/login", token=token)
                cookies = client.cookies
            client.cookies = cookies
            answers.append(client.get("/audit").status_code)
    assert answers == [200, 200, 303]


def test_a_login_that_is_forged_or_over(guarded: Client) -> None:
    for cookie in (Signer(b"e" * 32).signed(LOGIN, "ada 1 99999999999 x"), "x", "61.61", "."):
        guarded.cookies.set(LOGIN, cookie, domain="127.0.0.1")
        assert guarded.get("/audit").status_code == 303


def test_a_token_in_a_header_has_the_rights_of_its_line(guarded: Client, tokens: Tokens) -> None:
    answer = guarded.get("/parked", {"authorization": f"Bearer {OTHER}"})
    assert "replay/parked" in answer.text
    assert "discard/parked" not in answer.text
    assert user_of(tokens, OTHER) == User("bob", rights("replay,requeue"))


def test_a_file_of_tokens_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    for text in (
        "", "ada everything short", f"ada {TOKEN}", f"ada all {TOKEN}",
        f"a everything {TOKEN}\nb everything {TOKEN}", f"a everything {TOKEN}\na everything {OTHER}",
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigurationError) as refused:
            Tokens(file)
        assert refused.value.code == "MR-dashboard-access"
        assert TOKEN not in str(refused.value)
    with pytest.raises(ConfigurationError):
        Tokens(tmp_path / "none")


# -- A proxy, and this machine ----------------------------------------------------------------------------------------


def status(made: Any, address: str, headers: list[tuple[str, str]]) -> int:
    async def asking() -> int:
        transport = httpx.ASGITransport(made, client=(address, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
            return (await client.get("/audit", headers=headers)).status_code

    return asyncio.run(asking())


def test_a_header_is_believed_of_the_proxy_alone(trouble: Trouble) -> None:
    made = app(trouble.node.dsn, auth=ProxyHeader("X-User", ["10.0.0.0/24", "::1"], EVERYTHING))
    ada, eve = ("X-User", "ada"), ("x-user", "eve")
    try:
        assert status(made, "10.0.0.5", [ada]) == status(made, "::1", [ada]) == 200
        assert status(made, "10.0.1.5", [ada]) == 403
        assert status(made, "10.0.0.5", []) == 403
        assert status(made, "10.0.0.5", [eve, ada]) == 403
        assert status(made, "10.0.0.5", [("X-User", " ")]) == 403
        assert status(made, "unix", [ada]) == 403
    finally:
        made.state.sessions.close()
    with pytest.raises(ConfigurationError):
        ProxyHeader("X-User", ["nowhere"])
    with pytest.raises(ConfigurationError):
        ProxyHeader("X-User", [])


def test_a_local_dashboard_is_for_this_machine_alone(trouble: Trouble) -> None:
    made = app(trouble.node.dsn, auth=Local(User("me", READ_ONLY)))
    try:
        assert status(made, "127.0.0.1", []) == 200
        assert status(made, "10.0.0.5", []) == 403
        assert status(made, "127.0.0.1", [("X-Forwarded-For", "10.0.0.5")]) == 403
    finally:
        made.state.sessions.close()


def test_a_resolver_may_be_async_and_hosts_may_be_named(trouble: Trouble) -> None:
    async def resolve(_: object) -> User:
        return User("ada", EVERYTHING)

    made = app(trouble.node.dsn, auth=resolve, hosts=["Ops.example.org"])
    try:
        assert status(made, "10.0.0.5", [("host", "ops.example.org:443")]) == 200
        assert status(made, "10.0.0.5", [("host", "ops.example.org.evil.example")]) == 421
    finally:
        made.state.sessions.close()


def test_a_user_has_a_name_for_the_audit_and_rights_that_there_are() -> None:
    with pytest.raises(InvalidMessage):
        User(" ")
    with pytest.raises(ConfigurationError):
        User("ada", {"drop"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        rights("replay,drop")
    assert rights("everything") == EVERYTHING
    assert rights("read-only") == READ_ONLY
    with pytest.raises(ConfigurationError):
        app("postgresql://localhost/x", auth=lambda _: None, secret=b"short")
