"""What is logged about a repeated failure: each cause at once, and then once a minute how often it struck."""

import time
from collections.abc import Callable

from mailroom.errors import MailroomError, coded
from mailroom.session.settings import refusal

EVERY_S = 60.0


class Repeats:
    """The causes that have struck one lane since it last worked. Each lane has its own, and its line names the lane."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[str, tuple[int, float]] = {}  # how often since it was logged, and when that was

    def struck(self, cause: str) -> str | None:
        """Return what to add to the line: how often it has struck since the last line; None if no line is due."""
        now = self._monotonic()
        if cause not in self._seen:
            self._seen[cause] = 0, now
            return ""
        times, logged_at = self._seen[cause]
        if now - logged_at < EVERY_S:
            self._seen[cause] = times + 1, logged_at
            return None
        self._seen[cause] = 0, now
        return f", {times + 1} times in {now - logged_at:.0f} s"

    def over(self) -> None:
        """Forget them: the lane works."""
        self._seen.clear()


def cause(error: BaseException) -> str:
    """Return what a log may say about an error: ours and `refusal` contain no values; for all others only the class."""
    return coded(str(error), error) if isinstance(error, MailroomError) else refusal(error) or type(error).__name__
