"""Exceptions that a handler raises to choose the outcome of its message. Any other exception is a failed attempt.

The batch is always rolled back, except for a command whose handler raises `Reject`.
"""

from mailroom.values.numbers import seconds


class Retry(Exception):
    """Try the message again after `after_s` seconds, by default after the inbox's own backoff.

    This counts as an attempt: a message that has used up its attempts (`max_attempts`) is not tried again.
    """

    def __init__(self, after_s: float | None = None, reason: str = "the handler asked for another attempt") -> None:
        if after_s is not None:
            seconds(after_s, "after_s", 366 * 86_400, zero=True, error=ValueError)
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


class Reject(Skip):
    """Refuse a command: its sender gets `value` as an answer of status 400.

    What the handler wrote and sent for the command is undone, and the batch goes on. This is for handlers of `Handlers`
    and commands that ask for an answer. Elsewhere it is a `Skip`.
    """

    def __init__(self, value: object = None) -> None:
        super().__init__("rejected by its handler")  # the value is only for the sender, not for tables and logs
        self.value = value


class Unavailable(Exception):
    """What the handler needs is down: hold the inbox and try again, by default after a pause that grows to 10 s.

    The batch is rolled back and no attempt is counted, however often that happens. That loop of the worker claims
    nothing for `after_s` seconds. So everything else in this inbox waits too: have one inbox for each thing that can be
    down.
    """

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        if after_s is not None:
            seconds(after_s, "after_s", 86_400, zero=True, error=ValueError)
        super().__init__(reason)
        self.after_s = after_s
