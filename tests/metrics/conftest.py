"""Sessions of metrics with patience: on a machine that is busy two seconds may pass between any two steps."""

import pytest

from mailroom.metrics import leader, scrape


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for session in (leader.SAMPLER_SESSION, scrape.SCRAPE_SESSION):
        monkeypatch.setitem(session, "statement_timeout", "60s")
        monkeypatch.setitem(session, "lock_timeout", "60s")
