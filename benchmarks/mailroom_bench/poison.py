"""Poison: the latency of healthy keys while the handler fails on every message of one key in a hundred.

Each failing key is tried three times, waits in between, and is parked; from then on its messages move to `parked`. It
is compared with the same run in which no key fails. The first third, in which all keys are tried three times, has a
figure of its own.
"""

from .latency import percentile, waits_ms
from .measure import Bar, Line, Measurement, Setup, Values
from .workload import KEYS, key

POISONED = frozenset(key(nth) for nth in range(0, KEYS, 100))
MESSAGES = 6_000


def _run(setup: Setup) -> Values:
    healthy, beside = waits_ms(setup, MESSAGES), waits_ms(setup, MESSAGES, POISONED)
    return {
        "p50, none poisoned": percentile(healthy, 50),
        "p99, none poisoned": percentile(healthy, 99),
        "p50 beside poison": percentile(beside, 50),
        "p99 beside poison": percentile(beside, 99),
        "p99, first third": percentile(beside[: len(beside) // 3], 99),
    }


MEASUREMENT = Measurement(
    "poison",
    "latency of healthy keys while 1 % fail",
    (
        Line("p50, none poisoned", unit="ms"),
        Line("p99, none poisoned", unit="ms"),
        Line("p50 beside poison", unit="ms", baseline="p50, none poisoned"),
        Line("p99 beside poison", unit="ms", baseline="p99, none poisoned", bar=Bar(ratio_at_most=1.2)),
        Line("p99, first third", unit="ms", baseline="p99, none poisoned"),
    ),
    _run,
)
