"""What a lane fails with again and again: its lease tells it, since a lane that renews its lease looks well."""

import time
from collections.abc import Callable

import psycopg

from mailroom.roles.advice import grant_command, is_denied
from mailroom.session.repeats import cause
from mailroom.sql.sqlstate import AGAIN, CANCELLED, OF_THE_SERVER, primary_message, sqlstate

OVER_AFTER_S = 60.0  # what does not strike again for that long is over, whatever the lane does
# What runs beside the batches fails between batches that succeed: those end no failure that is younger than this.
YOUNG_S = 10.0
SHORT = 300


class RepeatedFailure:
    """The failure that a lane of one role repeats. `monotonic` is its clock, in seconds."""

    def __init__(self, purpose: str, schema: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._purpose = purpose
        self._schema = schema
        self._monotonic = monotonic
        self._why = self._run = ""
        self._since = self._last = 0.0
        self._times = 0

    def struck(self, error: Exception, user: str | None) -> None:
        """Note that the lane has failed, with sessions of this user."""
        now = self._monotonic()
        if not self._times or now - self._last > OVER_AFTER_S:
            self._since, self._times = now, 0
        self._last = now
        self._times += 1
        self._why = described(error)
        self._run = grant_command(self._purpose, user, schema=self._schema) if is_denied(error) else ""

    def worked(self) -> None:
        """Note that the lane has done what there was to do."""
        if self._times and self._monotonic() - self._last > YOUNG_S:
            self._times = 0

    def told(self) -> dict[str, object]:
        """Return what the lease tells of it; nothing if the lane works, or has failed once."""
        now = self._monotonic()
        if self._times < 2 or now - self._last > OVER_AFTER_S:
            return {}
        return {
            "failing": {
                "why": self._why, "run": self._run, "times": self._times, "for_s": round(now - self._since, 1),
            }
        }  # fmt: skip


def described(error: Exception) -> str:
    """Return the class of an error and what may be said of it: the server's text only where it has no value of a row.

    That is the case where it is about rights, locks and its own resources.
    """
    code = sqlstate(error) if isinstance(error, psycopg.Error) else ""
    if is_denied(error) or code in AGAIN or code == CANCELLED or code[:2] in OF_THE_SERVER:
        return f"{type(error).__name__} ({code}): {primary_message(error)}"[:SHORT]
    return f"{cause(error)}{f' ({code})' if code else ''}"[:SHORT]
