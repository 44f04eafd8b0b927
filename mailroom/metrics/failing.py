"""Since when all attempts of an inbox fail: what a lag leaves out, since failing keys wait on purpose."""

from collections.abc import Mapping
from datetime import datetime

from mailroom.metrics.changes import Changes, came_and_went, reading_changes
from mailroom.metrics.family import Family
from mailroom.sql.operation import Operation

INBOX_FAILING = Family(
    "inbox_failing_seconds",
    "gauge",
    "How long attempts of an inbox have failed while nothing of it was reaped, as this process has seen it: 0 if no "
    "key fails, and once something is reaped.",
    ("inbox",),
)


class Failing:
    """What was seen of the inboxes of one node, from its first look on."""

    def __init__(self) -> None:
        self._before: dict[str | None, Changes] = {}
        self._since: dict[str, datetime] = {}

    def looking(self, schema: str, keys: Mapping[str, int], now: datetime) -> Operation[dict[str, float]]:
        """Return for how many seconds each inbox of `keys` only fails, given how many failing keys it has."""
        before, self._before = self._before, (yield from reading_changes(schema))
        since = {}
        for inbox, number in keys.items():
            then, after = before.get(inbox), self._before.get(inbox)
            has_reaped = then is not None and after is not None and came_and_went(then, after)[1] > 0
            if number and not has_reaped:
                since[inbox] = self._since.get(inbox, now)
        self._since = since
        return {inbox: (now - since[inbox]).total_seconds() if inbox in since else 0.0 for inbox in keys}
