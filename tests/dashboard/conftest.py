"""A node with trouble in it, made once for the tests of a file that change nothing, and a browser without a screen."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from typing import Any

import httpx
import psycopg
import pytest
from starlette.applications import Starlette

from dispatcher.dashboard import EVERYTHING, User, app
from dispatcher.dashboard.forms import unpacked
from dispatcher.dashboard.sessions import LIMITS
from mailroom.embedded import find_binaries
from tests.dashboard.trouble import Trouble, make_trouble
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
