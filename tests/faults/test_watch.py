"""The watch of a campaign goes on ending what a killed writer has prepared, also if sessions wait for it."""

import pytest

from tests.faults.role_writer import GID
from tests.faults.stage import Stage, home_of_campaign

pytestmark = pytest.mark.nightly  # of the campaign itself, which a watch that stands still would fail


def test_orphan_is_ended_while_somebody_waits_for_its_table() -> None:
    with home_of_campaign() as home, Stage(home, 1, pace=1, roles=("nobody",)) as stage:
        with stage.host.session() as writer:
            writer.execute("BEGIN")
            writer.execute("LOCK TABLE mailroom.outbox IN ROW EXCLUSIVE MODE")
            writer.execute(f"PREPARE TRANSACTION '{GID}killed'".encode())
        stage.cast()
        with stage.host.session(options="-c lock_timeout=60s") as administrator, administrator.transaction():
            administrator.execute("LOCK TABLE mailroom.outbox IN ACCESS EXCLUSIVE MODE")
