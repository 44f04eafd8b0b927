"""The campaign of bridges for some seconds: `make bridges-soak` runs it for half an hour."""

from pathlib import Path

import pytest

from tests.faults.bridges.campaign import play
from tests.faults.links.strikes import Tally

SECONDS = 12.0


@pytest.mark.slow
@pytest.mark.one_version
def test_short_campaign_violates_nothing(kafka_home: Path) -> None:
    tally = Tally()
    messages, violated = play(SECONDS, 1, tally)
    assert violated == []
    assert messages
    assert tally.kinds
