"""What workers with `dispatch=True` run beside their loops: lanes that deliver and execute while no daemon does.

If several workers of a process use the same node and login, one of them has the turn and runs the lanes. The others
keep no session for that. One of them takes over when it stops, or when its event loop has stood still for as long as a
lease lasts.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from psycopg.conninfo import conninfo_to_dict

from inbox.worker.tasks import all_cancelled, first_error
from mailroom.errors import ConfigurationError, ConnectionFailed, coded
from mailroom.packages.installed import declared, load
from mailroom.session import backoff, settings
from mailroom.session.home import Home
from mailroom.session.listener import heard
from mailroom.session.repeats import Repeats

log = logging.getLogger("mailroom.worker")

# D-workers-15: One worker of a process dispatches.
BEAT_S = 0.25  # between two looks whose turn it is
SILENT_S = 3.0
LONGEST_PAUSE_S = 10.0  # between two tries to connect at first


class Dispatches(Protocol):
    """A lane: `dispatcher.Dispatcher` or `dispatcher.Executor`."""

    async def run(self) -> None:
        """Do the dispatcher's work while no other one leads, until stopped."""
        ...

    def stop(self) -> None:
        """Make `run` return."""
        ...


class _Turns:
    """Who has the turn in this process; threads and event loops share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: dict[Hashable, Turn] = {}


_turns = _Turns()


def _forget() -> None:
    global _turns
    _turns = _Turns()


# A forked process runs none of these lanes.
os.register_at_fork(after_in_child=_forget)


class Turn:
    """One worker's place among those of its process that would dispatch for the same node, by the same login."""

    def __init__(self, home: Home, schema: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._schema = schema
        self._monotonic = monotonic
        self._key: Hashable = None
        self._beat_at = 0.0

    def take(self) -> bool:
        """Take the turn if nobody has it, or keep it; return whether it is ours. It is lost after `SILENT_S`."""
        key, now, turns = self._login(), self._monotonic(), _turns
        with turns.lock:
            if self._key != key and turns.holders.get(self._key) is self:
                del turns.holders[self._key]  # the batches have another login by now
            self._key = key
            holder = turns.holders.setdefault(key, self)
            if holder is not self and now - holder._beat_at < SILENT_S:
                return False
            turns.holders[key] = self
            self._beat_at = now
            return True

    def give_up(self) -> None:
        """Let another worker have the turn."""
        turns = _turns
        with turns.lock:
            if turns.holders.get(self._key) is self:
                del turns.holders[self._key]

    def _login(self) -> Hashable:
        """Return the node and the login of the lanes, without the password, which may change."""
        try:
            parts = conninfo_to_dict(self._home.dsn)
        except ConfigurationError:
            return self  # unknown: it shares the turn with no other worker
        hidden = settings.secrets()
        return self._schema, frozenset((name, value) for name, value in parts.items() if name not in hidden)


class Dispatching:
    """Runs the lanes while it is this worker's turn. Raises an error if they cannot be imported."""

    def __init__(self, name: str, home: Home, schema: str, poll_interval_s: float, repeats: Repeats) -> None:
        # Found by entry point, since `inbox` must not import `dispatcher`.
        makers = [load(lane) for lane in declared("mailroom.dispatcher")]
        self._make: Callable[[], list[Dispatches]] = lambda: [
            make(home, schema=schema, poll_interval_s=poll_interval_s) for make in makers
        ]
        self._name = name
        self._repeats = repeats
        self._turn = Turn(home, schema)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `run` return, when the lanes have finished their batches."""
        self._stopping.set()

    async def run(self) -> None:
        """Dispatch whenever it is this worker's turn, until stopped."""
        try:
            while not self._stopping.is_set():
                if self._turn.take():
                    await self._lead()
                await heard(self._stopping, BEAT_S)
        finally:
            self._turn.give_up()

    async def _lead(self) -> None:
        """Run the lanes until this worker is stopped or has lost its turn; raises what ends one of them."""
        lanes = self._make()
        tasks = [asyncio.create_task(self._running(lane)) for lane in lanes]
        try:
            while not any(task.done() for task in tasks) and self._turn.take():
                if await heard(self._stopping, BEAT_S):
                    break
            for lane in lanes:
                lane.stop()
            await asyncio.wait(tasks)
        finally:
            cancelled = await all_cancelled(tasks)
        error = first_error(tasks)
        if cancelled is not None:
            raise cancelled
        if error is not None:
            raise error

    async def _running(self, lane: Dispatches) -> None:
        """Run a lane, which raises an error if its first connection fails: as for the worker, it tries again."""
        failures = 0
        while True:
            try:
                return await lane.run()
            except ConnectionFailed as error:
                if isinstance(error, ConfigurationError):  # it leads to another database
                    raise
                failures += 1
                pause_s = backoff.pause_s(failures, LONGEST_PAUSE_S)
                if (again := self._repeats.struck(str(error))) is not None:
                    log.warning("%s: cannot dispatch, trying again: %s%s", self._name, coded(str(error), error), again)
                if await heard(self._stopping, pause_s):
                    return None
