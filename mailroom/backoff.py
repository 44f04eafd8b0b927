"""How long to wait before trying again."""

import random


def pause_s(failures: int, longest_s: float) -> float:
    """Return seconds to wait after so many failures in a row: exponential from 0.1 s up to `longest_s`, full jitter.

    Full jitter, so that sessions which lost one server together do not come back together (M. Brooker, "Exponential
    Backoff And Jitter", 2015).
    """
    return random.uniform(0.02, min(longest_s, 0.1 * 2 ** min(failures, 20)))  # noqa: S311 - nothing secret about it


def is_worth_a_line(failures: int, pause_s: float) -> bool:
    """Tell whether to log a failure that such a pause follows: an outage makes one line at once, then one a second.

    `failures` counts those in a row. The first pauses are short, and many sessions may have lost one server.
    """
    return failures == 1 or pause_s >= 1
