"""Exceptions that a handler raises to choose the outcome of its message. Any other exception is a failed attempt.

The batch is rolled back in every case.
"""


class Retry(Exception):
    """Try the message again after `after_s` seconds, by default after the inbox's own backoff.

    This counts as an attempt: a message that has used up its attempts (`max_attempts`) is not tried again.
    """

    def __init__(self, after_s: float | None = None, reason: str = "the handler asked for another attempt") -> None:
        if after_s is not None and not 0 <= after_s <= 366 * 86_400:
            raise ValueError(f"after_s is {after_s!r}; give seconds from 0 to a year.")
        super().__init__(reason)
        self.after_s = after_s


class Park(Exception):
    """Park the key at once: this message and all later ones of the key are held, in order, until an operator acts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Skip(Exception):
    """Move only this message to `dead_letter`, at once; its key continues with the next message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
