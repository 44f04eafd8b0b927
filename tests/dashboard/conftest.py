"""A node with trouble in it, made once for the tests of a file that change nothing, and a browser without a screen."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from starlette.applications import Starlette

from dispatcher.dashboard import EVERYTHING, User, app
from dispatcher.dashboard.forms import unpacked
from dispatcher.dashboard.sessions import LIMITS
from mailroom.embedded import find_binaries
from tests.dashboard.driving import forms_sent
from tests.dashboard.serving import running
from tests.dashboard.trouble import Trouble, make_trouble
from tests.support.browser import browser as chromium
from tests.support.databases import Databases

ORIGIN = "http://127.0.0.1:8466"
ADA = User("ada@ops", EVERYTHING)
LIMITS_OF_THE_PRODUCT = dict(LIMITS)


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Let statements take a minute: on a machine that is busy two seconds may pass between any two steps."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            patched.setitem(LIMITS, name, "60s")
        yield


@pytest.fixture(scope="module")
def trouble(_databases_of: Callable[[int | None], Databases], pytestconfig: pytest.Config) -> Iterator[Trouble]:
    """A node with trouble of every kind."""
    external = "MAILROOM_TEST_DSN" in os.environ
    databases = _databases_of(None if external else find_binaries().major)
    dsn = databases.create(migrated=True)
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield make_trouble(dsn, connection)
        assert not databases.leaks(dsn)
    finally:
        databases.drop(dsn)


class Client:
    """A browser that runs no scripts: it keeps cookies, follows nothing, and asks an app in this process."""

    def __init__(self, made: Starlette, address: str = "127.0.0.1") -> None:
        self._transport = httpx.ASGITransport(made, client=(address, 50_000))
        self.made, self.cookies = made, httpx.Cookies()

    def request(self, method: str, path: str, headers: Mapping[str, str] | None = None, **given: Any) -> httpx.Response:
        async def asking() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=self._transport, base_url=ORIGIN, cookies=self.cookies, follow_redirects=False
            ) as client:
                answer = await client.request(method, path, headers=headers, **given)
                self.cookies = client.cookies
                return answer

        return asyncio.run(asking())

    def get(self, path: str, headers: Mapping[str, str] | None = None, **fields: str) -> httpx.Response:
        return self.request("GET", path, headers, params=fields or None)

    def post(self, path: str, origin: str = ORIGIN, **fields: str) -> httpx.Response:
        return self.request("POST", path, {"origin": origin}, data=fields)

    def close(self) -> None:
        self.made.state.sessions.close()


@contextmanager
def browsing(dsn: str, user: User | None = ADA, *, payloads: bool = False) -> Iterator[Client]:
    """Yield the browser of a dashboard that knows one user."""
    client = Client(app(dsn, auth=lambda _: user, payloads=payloads))
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def browser(trouble: Trouble) -> Iterator[Client]:
    """A browser of a dashboard in which Ada may do everything."""
    with browsing(trouble.node.dsn) as client:
        yield client


# -- A real browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at(trouble: Trouble) -> Iterator[str]:
    """The address of a dashboard that runs in a process of its own."""
    with running(trouble.node.dsn) as (_, address):
        yield address


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A window of a Chromium."""
    with chromium(tmp_path_factory.mktemp("chromium")) as window:
        yield window


@pytest.fixture(scope="module")
def photograph(window: Any) -> Callable[[str], None]:
    """What takes a screenshot, if anybody wants them: $MAILROOM_ARTEFACTS names a folder for them."""
    if not (wanted := os.environ.get("MAILROOM_ARTEFACTS")):
        return lambda name: None
    home = Path(wanted) / "mailroom-dashboard"
    home.mkdir(parents=True, exist_ok=True)
    return lambda name: window.save_screenshot(str(home / f"{name}.png"))


@pytest.fixture(autouse=True)
def posts_what_it_says(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold a test to what it `does`: it sends each of these forms in the browser, and no other."""
    says = getattr(request.function, "does", None)
    if says is None:
        yield
        return
    window = request.getfixturevalue("window")
    forms_sent(window)  # those of tests before
    yield
    assert forms_sent(window) == says


def forms(page: str, base: str = "") -> dict[tuple[str, ...], dict[str, str]]:
    """Return the forms of a page by their act, and by what the page fixes in them, with their hidden fields."""
    found = {}
    for act, form in re.findall(rf'<form method="post" action="{base}/act/([^"]+)"[^>]*>(.*?)</form>', page, re.DOTALL):
        fields = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', form)
        given = {name: unescape(value) for name, value in fields}
        fixed = unpacked(given)
        named = (act, *(fixed[name] for name in ("key", "id", "all") if name in fixed))
        found[named] = given
    return found
