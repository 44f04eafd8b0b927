"""How long to wait before trying again."""

import random


def pause_s(failures: int, longest_s: float) -> float:
    """Return seconds to wait after that many failures in a row: exponential from 0.1 s up to `longest_s`, full jitter.

    Jitter keeps sessions that lost a server at the same time from coming back at the same time (M. Brooker,
    "Exponential Backoff And Jitter", 2015).
    """
    return random.uniform(0.02, min(longest_s, 0.1 * 2 ** min(failures, 20)))  # noqa: S311 - nothing secret about it


def spread_s(first_s: float, longest_s: float, attempts: int) -> float:
    """Return the mean number of seconds between the first and the last attempt at a message.

    Between two attempts a key waits from half of a full wait to all of it. Full waits start at `first_s` and double up
    to `longest_s`.
    """
    doubled = (first_s * 2.0 ** min(nth, 30) for nth in range(min(attempts - 1, 60)))
    waits = sum(min(longest_s, each) for each in doubled) + longest_s * max(0, attempts - 61)
    return 0.75 * waits
