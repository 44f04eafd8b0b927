"""Each page answers, and shows what it should, of a node with trouble in it."""

from uuid import uuid4

import pytest

from tests.dashboard.conftest import Client, browsing
from tests.dashboard.trouble import KEY, SCRIPT, SECRET, Trouble

pytestmark = pytest.mark.one_version

PAGES = (
    "/", "/inboxes", "/inboxes/shipping", "/parked", "/dead-letters", "/message", "/routes", "/waiting",
    "/executables", "/workers", "/links", "/doctor", "/doctor/findings", "/audit",
)  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_page(browser: Client, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 200, answer.text[-3000:]
