"""The crash matrix of a log: each statement of deliveries, claims, rewinds and segments, struck in each way."""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

from tests.faults.crashing import Matrix, faults_at, sampled
from tests.faults.nursery import Nursery
from tests.faults.role_log import READERS, TABLES, go_through
from tests.logs.support import make
from tests.support.node import Node

SENT = 6
KEYS = 3
PARTS = 4
# What a log consists of. A statement that is renamed, or no longer passed, is missed here.
STATEMENTS = {
    "dispatcher.delivery.deliver.DELIVER_PLAIN_LOGS", "dispatcher.delivery.deliver.DELIVER",
    "inbox.by_log.lanes.LOCK", "inbox.by_log.lanes.COVERING", "inbox.by_log.log_claim.READ_PLAIN",
    "inbox.by_log.log_claim.READ", "inbox.by_log.log_failure.RECORD", "inbox.by_log.rewind.LANES",
    "inbox.by_log.rewind.DIVERTED", "inbox.by_log.rewind.KEYS", "inbox.by_log.rewind.REWIND",
    "mailroom.logs.segments.MAKE", "mailroom.logs.segments.HOLDS", "mailroom.logs.segments.EMPTY",
    "mailroom.logs.segments.DROP", "mailroom.logs.segments.TICKS", "mailroom.logs.segments.RECEIPTS",
}  # fmt: skip


class LogMatrix(Matrix):
    """A log and its readers."""

    role = "log"

    def __init__(self, node: Node, nursery: Nursery, home: Path) -> None:
        super().__init__(nursery, home)
        self.node = node
        self.sent: set[UUID] = set()  # since the last check

    def dsns(self) -> tuple[str, str]:
        return self.node.dsn, self.node.dsn

    def send(self) -> None:
        """Send messages of several keys; one of them is not plain, and one fails at first."""
        later = datetime.now(UTC) + timedelta(days=9)
        for nth in range(SENT):
            fields = {"expires_at": later} if nth == 1 else {}
            self.sent.add(self.node.send("order.paid", nth, key=f"k{nth % KEYS}", **fields))

    def go_on(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(go_through, self.node.dsn).result()

    def work_beside(self) -> None:
        for pid in self.node.sessions("mailroom log", "state = 'idle in transaction'"):
            self.node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        self.go_on()

    def check(self, case: str) -> None:
        """Hold what each reader has handled against what was sent and how far it was set back."""
        clocks: dict[UUID, int] = dict(self.node.rows("SELECT DISTINCT mid, clock FROM handled"))
        assert len(set(clocks.values())) == len(clocks), f"{case}: a clock of two messages, or two of one"
        for inbox in READERS:
            handled = self.node.rows("SELECT epoch, mid, key, clock FROM handled WHERE inbox = %s ORDER BY n", inbox)
            places: dict[int, int] = dict(
                self.node.rows("SELECT epoch, clock FROM rewound WHERE inbox = %s ORDER BY epoch", inbox)
            )
            epochs: dict[int, list[tuple[UUID, str, int]]] = defaultdict(list)
            for epoch, *message in handled:
                epochs[epoch].append(tuple(message))
            assert {mid for _, mid, _, _ in handled} >= self.sent, f"{case}: {inbox} has lost messages"
            for epoch, messages in epochs.items():
                mids = [mid for mid, _, _ in messages]
                assert len(set(mids)) == len(mids), f"{case}: {inbox} had messages twice"
                assert all(clock > places.get(epoch, 0) for _, _, clock in messages), (
                    f"{case}: {inbox} went too far back"
                )
                for key in {key for _, key, _ in messages}:
                    along = [clock for _, of, clock in messages if of == key]
                    assert all(before < after for before, after in pairwise(along)), f"{case}: {inbox} out of order"
            last = max(places, default=None)
            if last is not None:
                again = {clock for _, _, clock in epochs[last]}
                wanted = {clock for clock in clocks.values() if clock > places[last]}
                assert again == wanted, f"{case}: {inbox} did not read all of it again"
        self._check_tables(case)
        self.node.connection.execute("DELETE FROM handled; DELETE FROM rewound")
        self.sent = set()

    def _check_tables(self, case: str) -> None:
        for table in ("outbox", "inbox", "key_state", "parked", "dead_letter"):
            assert self.node.rows(f"SELECT FROM mailroom.{table}") == [], f"{case}: {table}"
        partitions = self.node.rows(
            "SELECT substr(relid::text, 14)::bigint FROM pg_partition_tree('mailroom.log') WHERE isleaf ORDER BY 1"
        )
        known = self.node.rows("SELECT segment FROM mailroom.log_segment ORDER BY 1")
        assert partitions == known, f"{case}: segments without tables, or tables without segments"
        assert len(known) < 8, f"{case}: segments are held"
        newest = "SELECT max(segment) FROM mailroom.log_segment WHERE emptied_at IS NULL"
        assert self.node.value(newest) == known[-1][0], case


@pytest.fixture
def matrix(node: Node, tmp_path: Path) -> Iterator[LogMatrix]:
    make(node, *READERS, lanes=2, backoff_s=0)
    node.connection.execute("UPDATE mailroom.log_registry SET keep_days = 1")
    node.connection.execute(TABLES)
    nursery = Nursery(tmp_path, {})
    try:
        matrix = LogMatrix(node, nursery, tmp_path)
        matrix.send()
        matrix.go_on()  # so that later ones find segments to empty and to drop
        matrix.go_on()
        matrix.check("nothing was struck")
        yield matrix
    finally:
        nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_log_struck_at_any_statement_is_read_once_and_in_order(matrix: LogMatrix) -> None:
    points = matrix.points()
    assert {name for name, _ in points} >= STATEMENTS
    some = sampled(faults_at(points))
    matrix.run(some)
    assert matrix.struck >= len(some) // 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_rest_of_the_crash_matrix_of_a_log(matrix: LogMatrix, part: int) -> None:
    all_of_them = faults_at(matrix.points())
    some = sampled(all_of_them)
    matrix.run([each for each in all_of_them if each not in some][part::PARTS])
