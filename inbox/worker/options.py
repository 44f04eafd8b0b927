"""How a worker works, as its caller has chosen it. It is checked once and held once, whatever kind of worker it is."""

from dataclasses import dataclass

from inbox.handling import arguments
from mailroom.session import settings
from mailroom.values.numbers import seconds


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of `inbox.Worker`, which says what they mean. Raises `ConfigurationError` for one that is wrong."""

    parallel: int
    batch: int
    batch_s: float | None
    timeout_s: float | None
    poll_interval_s: float
    dispatch: bool
    listen_dsn: str | None
    fatal: tuple[type[Exception], ...]
    handle_signals: bool

    def __post_init__(self) -> None:
        arguments.count(self.batch, "batch")
        for name in ("batch_s", "timeout_s"):
            if getattr(self, name) is not None:
                seconds(getattr(self, name), name)
        seconds(self.poll_interval_s, "poll_interval_s")
        arguments.exceptions(self.fatal, "fatal")
        arguments.count(self.parallel, "parallel")
        arguments.flag(self.dispatch, "dispatch")
        _ = self.listen_to

    @property
    def listen_to(self) -> str | None:
        """The connection string of the session that listens; None for where the source's connections are."""
        return None if self.listen_dsn is None else settings.dsn(self.listen_dsn)
