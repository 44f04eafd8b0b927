"""What a handler may raise to say itself what becomes of its message. Any other exception is a failed attempt."""


class Verdict(Exception):
    """The batch is rolled back, whatever the verdict."""


class Retry(Verdict):
    """A failed attempt whose next one comes after `after_s` seconds; None stands for the inbox's own back-off.

    It counts: a message that has had its last attempt (`max_attempts`) is not tried again.
    """

    def __init__(self, after_s: float | None = None, reason: str = "the handler asked for another attempt") -> None:
        if after_s is not None and not 0 <= after_s <= 366 * 86_400:
            raise ValueError(f"after_s is {after_s!r}; give seconds from 0 to a year.")
        super().__init__(reason)
        self.after_s = after_s


class Park(Verdict):
    """Park the key at once: this message and all later ones of the key are held, in order, until somebody acts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Skip(Verdict):
    """Move this message alone to `dead_letter` at once; the key goes on with its next one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
