"""Ten thousand times, two senders that are killed again and again: exactly one message for each time."""

import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox import Periodic, PeriodicMessage
from outbox.periodic.schedule import message_id
from tests.support.node import Node
from tests.support.waiting import WITHIN_S

ROOT = Path(__file__).parents[2]
START = datetime(2026, 11, 26, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
NAMES = [f"p{nth}" for nth in range(20)]
TIMES = 500  # of each of them
KILLS = 12
SEED = 7


@pytest.mark.slow
def test_each_of_ten_thousand_times_is_sent_once_by_senders_that_are_killed(node: Node) -> None:
    with node.connection.transaction():
        declared = [PeriodicMessage(name, "* * * * *", "tick", missed="all", key=name) for name in NAMES]
        Periodic().sync(node.connection, declared, actor="test", now=START)
    drawn = random.Random(SEED)
    moments = sorted(drawn.randrange(1, len(NAMES) * TIMES * 9 // 10) for _ in range(KILLS))
    now = START + TIMES * MINUTE
    command = [sys.executable, "-m", "tests.periodic.killed", node.dsn, now.isoformat(), str(SEED), *map(str, moments)]
    assert subprocess.run(command, cwd=ROOT, timeout=5 * WITHIN_S).returncode == 0
    [(own,)] = node.rows("SELECT id FROM mailroom.node")
    due = [START + nth * MINUTE for nth in range(1, TIMES + 1)]
    expected = {message_id(own, name, each) for name in NAMES for each in due}
    sent = [id for (id,) in node.rows("SELECT message_id FROM mailroom.outbox")]
    assert len(sent) == len(set(sent)) == len(expected) == 10_000
    assert set(sent) == expected
    # Those of one key stand in the order of their times.
    times = node.rows("SELECT headers ->> 'due' FROM mailroom.outbox WHERE key = 'p7' ORDER BY position")
    assert [datetime.fromisoformat(each) for (each,) in times] == due
    assert {each.next_at for each in Periodic().list(node.connection)} == {START + (TIMES + 1) * MINUTE}
