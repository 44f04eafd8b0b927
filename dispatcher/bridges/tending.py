"""What publishing and taking in have in common: one bridge is tended for as long as the lane leads, whatever happens.

After any error it tries again with a backoff, and only this bridge is concerned. Why it stands still, and since when,
is recorded. It also keeps trying if a person has to act, so that nothing needs to be started afterwards.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import psycopg

from dispatcher.lanes.lease import LEASE_S
from dispatcher.links.at_source.source import SourceFailed
from dispatcher.links.receiver import LinkStopped
from dispatcher.links.receiving import Receiving
from mailroom.bridges.into import Overtaken
from mailroom.bridges.publisher import Answered, BrokerRefused, BrokerTrouble, Fenced
from mailroom.errors import Coded, ConfigurationError, ConnectionFailed, coded
from mailroom.links.handshake.hello import LinkTaken
from mailroom.links.start import NodeHome, reading_home
from mailroom.session import backoff
from mailroom.session.listener import heard
from mailroom.sql.operation import Operation
from mailroom.sql.sqlstate import primary_message, sqlstate

log = logging.getLogger("mailroom.dispatcher")

PATIENCE_S = 3.0  # trouble is noted when it has lasted for so long
LONGEST_PAUSE_S = 4.0
LONGEST_STOP_S = 30.0
OPEN_S = 30.0  # a client that has reached nobody for so long is made anew: its options may be right by now

STARTED_WITHIN_S, STARTED_PAUSE_S = 3.0, 0.2  # a dispatcher after its server; it is told if that takes longer
NOT_STARTED = "no dispatcher of this node has started since its server did: mailroom dispatcher run"
ELSEWHERE = (
    "this node is in another database or server than before, and a copy must not do what its node does. If it was "
    "moved: mailroom node moved; if it is a copy of a node that lives on: mailroom node new-id"
)

T = TypeVar("T")
Trouble: TypeAlias = Literal["unreachable", "refused", "failing"]


class BridgeStopped(Coded):
    """A message or a record holds the bridge up before somebody acts."""


class BrokerClient(Protocol):
    """What both kinds of clients of a broker have."""

    @property
    def trouble(self) -> str | None:
        """What the client has reported last while it waits."""
        ...

    async def close(self) -> None:
        """End at once."""
        ...


@runtime_checkable
class Answering(Protocol):
    """A client that tells when the broker has last answered, by `time.monotonic`; None if it never has."""

    @property
    def answered_at(self) -> float | None:
        """Return that."""
        ...


class Tending(ABC):
    """Tends the bridge `name` until it is told to stop. Trouble is noted over `receiving`, the lane's session."""

    verb: str  # what it does, as a participle

    def __init__(self, name: str, schema: str, receiving: Receiving) -> None:
        self._name = name
        self._schema = schema
        self._receiving = receiving
        self._rung = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failures = 0
        self._failed_at = 0.0
        self._told: str | None = None
        self._noted = True  # what a dispatcher before this one has noted, is mended by the first success

    @abstractmethod
    async def _serve(self) -> None:
        """Work for as long as one client of the broker lasts."""

    def _waits_for(self) -> str | None:
        """Return what waits, if that is known better than by the broker's client."""
        return None

    @abstractmethod
    def _noting(self, trouble: Trouble | None, why: str, for_s: float) -> Operation[object]:
        """Record trouble; None: it is stopped."""

    @abstractmethod
    def _noting_well(self) -> Operation[object]:
        """Record that there is no trouble any more."""

    def stop(self) -> None:
        """Have it end soon; what is under way at the broker is given up, and done again by whoever is next."""
        self._stopping.set()
        self._rung.set()

    def look(self) -> None:
        """Look for work at once."""
        self._rung.set()

    def resume(self) -> None:
        """Try again at once if trouble was noted: somebody has acted, since none is recorded any more."""
        if self._noted and self._told is not None:
            self._noted, self._failures = False, 0
            self._rung.set()

    def is_noted(self) -> None:
        """Be told that trouble is recorded, maybe by a daemon that no longer leads: the next success mends it."""
        self._noted = True

    async def run(self) -> None:
        """Work until told to stop. Raises only what has lost the session of the lane."""
        while not self._stopping.is_set():
            try:
                await self._serve()
                continue
            except (LinkTaken, Fenced, Overtaken):
                log.info("bridges: another dispatcher has %s by now", self._name)
                pause_s = LEASE_S  # meanwhile the keeper finds out whether this daemon still leads
            except BrokerTrouble as trouble:
                pause_s = await self._fails("unreachable", str(trouble))
            except (BrokerRefused, BridgeStopped, LinkStopped, ConfigurationError) as error:
                pause_s = await self._fails(None, coded(str(error), error))
            except (SourceFailed, ConnectionFailed, psycopg.Error) as failed:
                if self._receiving.is_lost:
                    raise
                cause = failed.error if isinstance(failed, SourceFailed) else failed
                pause_s = await self._fails("failing", f"this node's database: {_told(cause)}")
            except Exception as error:
                if self._receiving.is_lost:
                    raise
                log.exception("bridges: %s is not %s", self._name, self.verb)
                pause_s = await self._fails("failing", f"{type(error).__name__}: see the log of the dispatcher")
            if not self._stopping.is_set():
                await heard(self._rung, pause_s)
            self._rung.clear()

    async def _is_started(self, ask: Callable[[Operation[NodeHome]], Awaitable[NodeHome]]) -> bool:
        """Wait until a dispatcher has started since the server did; return False if this one is to stop before.

        What was lost with the server is known only then. Who began before would take the link in the old history, and
        publish again, with other clocks, what a node that was put back stamps again. Raises `BridgeStopped` if this may
        be a copy of the node: it would publish for it, or take from queues what is for it.
        """
        began = time.monotonic()
        while not self._stopping.is_set():
            home = await ask(reading_home(self._schema))
            if home.is_elsewhere:
                raise BridgeStopped(ELSEWHERE, code="MR-node-moved")
            if home.noted in (None, home.found):
                return True
            if (waited_s := time.monotonic() - began) > STARTED_WITHIN_S:
                await self._note("failing", NOT_STARTED, waited_s)
            await heard(self._stopping, STARTED_PAUSE_S)
        return False

    async def _waiting(
        self, client: BrokerClient, work: Coroutine[Any, Any, T], at_most_s: float = float("inf")
    ) -> T:  # fmt: skip
        """Return the result of `work`, which waits for the broker; note it if that takes long, and end it on a stop.

        Raises `BrokerTrouble` after `at_most_s`; what publishes waits for as long as it takes.
        """
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopping.wait())
        began = answered = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait([task, stopped], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done() and not task.done():
                    await client.close()
                    await asyncio.wait([task])
                elif not task.done():
                    last, answered = answered, _answered_at(client, answered)
                    if (waits := self._waits_for()) is None and answered > last:
                        await self._goes_well()  # what is sent at once may take longer than its first answer
                        continue
                    why = waits or client.trouble or "the broker has not answered"
                    await self._note(kind_of(why), why, time.monotonic() - (began if waits else answered))
                    if time.monotonic() - began >= at_most_s:
                        await client.close()
                        await asyncio.wait([task])
                        task.exception()  # that it was given up
                        raise BrokerTrouble(why)
            return task.result()
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()

    async def _goes_well(self) -> None:
        self._failures = 0
        if self._told is not None:
            log.info("bridges: %s is %s again", self._name, self.verb)
            self._told = None
        if self._noted:
            await self._receiving.transaction(self._noting_well())
            self._noted = False

    async def _fails(self, trouble: Trouble | None, why: str) -> float:
        """Note that it stands still, and why; return for how long to pause."""
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures += 1
        await self._note(trouble, why, time.monotonic() - self._failed_at)
        return backoff.pause_s(self._failures, LONGEST_STOP_S if trouble is None else LONGEST_PAUSE_S)

    async def _note(self, trouble: Trouble | None, why: str, for_s: float) -> None:
        if self._stopping.is_set():
            return  # what is given up at the end is no trouble, and would take the place of what is
        if self._told != why:
            level = logging.ERROR if trouble is None else logging.WARNING
            log.log(level, "bridges: %s is not %s: %s", self._name, self.verb, why)
            self._told = why
        if trouble is not None and for_s < PATIENCE_S:
            return
        self._noted = True
        try:
            await self._receiving.transaction(self._noting(trouble, why, for_s))
        except psycopg.Error:
            if self._receiving.is_lost:
                raise
            log.warning("bridges: the trouble of %s could not be noted", self._name)


def _answered_at(client: BrokerClient, before: float) -> float:
    answered_at = client.answered_at if isinstance(client, Answering) else None
    return before if answered_at is None else max(before, answered_at)


def kind_of(why: str) -> Trouble:
    """Return which trouble this is of a broker."""
    return "refused" if isinstance(why, Answered) else "unreachable"


def _told(error: Exception) -> str:
    """Return what the database has said, or how it was lost."""
    if sqlstate(error):
        return primary_message(error)
    return " ".join(str(error).split())[:300] or type(error).__name__
