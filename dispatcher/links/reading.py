"""Reads one origin for as long as the lane leads, whatever happens to its source.

After any error at the source it tries again with a backoff, and only this origin is concerned. Why it is not read, and
since when, is recorded in `origin`. It also keeps trying if a person has to act, so that nothing needs to be started
afterwards.
"""

import logging
import time
from collections.abc import Callable

import psycopg

from dispatcher.lanes.lease import LEASE_S
from dispatcher.links.at_source.source import SourceFailed, open_source
from dispatcher.links.receiver import LinkStopped
from dispatcher.links.visit import Notes, Stopped, Visit, VisitTarget
from mailroom.errors import ConfigurationError, LinkRefused, coded
from mailroom.links.handshake.hello import LinkTaken, Rivals
from mailroom.links.handshake.target import Origin, Trouble, failing, opening, reading_origins, stopping
from mailroom.links.service import source_dsn
from mailroom.session import backoff
from mailroom.sql.operation import Operation
from mailroom.sql.sqlstate import primary_message, sqlstate

log = logging.getLogger("mailroom.dispatcher")

LONGEST_PAUSE_S = 4.0  # before connecting again, or saying hello again
LONGEST_STOP_S = 30.0  # before trying again what stopped it after a hello, which may cost more
# Trouble is noted when it has lasted so long: while the source's server starts it is passing.
# D-links-10: Trouble is recorded beside the state.
PATIENCE_S = 3.0
# What the source's server refuses until an operator acts there, by SQLSTATE.
RIGHTS = "mailroom grant link-reader ROLE, and policies that show it all rows where there is row security"
REFUSED = {
    "42501": RIGHTS,
    "25006": "let this role write (ALTER ROLE ... RESET default_transaction_read_only), and name the primary",
    "55000": "name the primary: a standby cannot be read",
    "3F000": "mailroom migrate",
    "42P01": "mailroom migrate",
    "42703": "mailroom migrate",
    "42883": "mailroom migrate",
}


class Reading:
    """Reads one origin. `tell` logs an error that nothing explains."""

    def __init__(self, origin: Origin, target: VisitTarget, notes: Notes, tell: Callable[[Exception], None]) -> None:
        self.notes = notes
        self.state = "connecting"
        self._number = origin.number
        self._name = origin.name
        self._target = target
        self._tell = tell
        self._rivals = Rivals()
        self._failures = 0
        self._failed_at = 0.0
        self._told: str | None = None
        self._noted = origin.why is not None

    def stop(self) -> None:
        """Have it end after the step under way."""
        self.notes.stopping = True
        self.notes.rung.set()

    async def run(self) -> None:
        """Read until told to stop. Raises only what has lost the target's session."""
        while not self.notes.stopping:
            try:
                await self._visit()
                continue
            except SourceFailed as failed:
                pause_s = await self._lost(failed.error)
            except LinkTaken:
                pause_s = await self._taken()
            except (LinkRefused, LinkStopped, ConfigurationError, Stopped) as error:
                pause_s = await self._refused(error)
            except Exception as error:
                if self._target.receiving.is_lost:
                    raise
                pause_s = await self._failed(error)
            self.notes.received = None
            await self.notes.pause(pause_s)

    async def _visit(self) -> None:
        """Read for as long as one session at the source lasts."""
        origin = await self._origin()
        if origin is None:
            return
        async with open_source(source_dsn(origin.name, origin.service), origin.schema) as source:
            diverged = False
            while origin is not None and not self.notes.stopping:
                visit = Visit(source, self._target, origin, self.notes, self._reads, self._held_up)
                diverged = await visit.run(claims=diverged)
                if diverged and origin.state == "open":
                    await self._waits(
                        f"{self._name} no longer has the last row that we received from it, and its dispatcher has "
                        f"not answered yet; at {self._name}: mailroom dispatcher run"
                    )
                origin = await self._origin()

    async def _origin(self) -> Origin | None:
        """Return the origin as it is now; if it is not to be read, wait for the lane to end this reading."""
        found = await self._target.receiving.run(reading_origins(self._target.schema, self._number))
        if found and found[0].state != "excluded":
            return found[0]
        await self.notes.pause(LONGEST_PAUSE_S)
        return None

    async def _reads(self) -> None:
        if self._told is not None:
            log.info("links: %s is read again", self._name)
        self._told, self._failures, self.state = None, 0, "reading"
        if self._noted:
            await self._target.receiving.transaction(opening(self._target.schema, self._number))
            self._noted = False

    def _fails(self) -> int:
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures += 1
        return self._failures

    async def _note(self, noting: Callable[[float], Operation[bool]]) -> None:
        """Record trouble at the target once it has lasted; `noting` is given how many seconds it has."""
        for_s = time.monotonic() - self._failed_at
        if for_s < PATIENCE_S:
            return
        self._noted = True
        try:
            await self._target.receiving.transaction(noting(for_s))
        except psycopg.Error as error:
            if self._target.receiving.is_lost:
                raise
            self._tell(error)  # and it is noted at the next try

    async def _fails_with(self, trouble: Trouble, why: str) -> float:
        pause_s = backoff.pause_s(self._fails(), LONGEST_PAUSE_S)
        await self._note(lambda for_s: failing(self._target.schema, self._number, trouble, why, for_s))
        return pause_s

    async def _lost(self, error: Exception) -> float:
        """The source is not reached, or its server has refused a step."""
        if act := REFUSED.get(sqlstate(error)):
            return await self._refused(
                LinkRefused(f"{self._name}: {primary_message(error)}", self._name, act, code="MR-link-database-refused")
            )
        # What `settings` adds names the variable of this node's own database.
        reason = " ".join(str(error).split()).partition(". Check ")[0][:300] or type(error).__name__
        self.state = f"unreachable: {reason}"
        if self._told is None and not self.notes.stopping:
            log.warning("links: %s is not reached, trying again: %s", self._name, reason)
            self._told = reason
        return await self._fails_with("unreachable", reason)

    async def _held_up(self, error: Exception) -> None:
        await self._waits(f"held up by a lock, or cancelled: {primary_message(error)}")

    async def _waits(self, why: str) -> None:
        self.state = f"failing: {why}"
        await self._fails_with("failing", why)

    async def _taken(self) -> float:
        self.state = "taken by another daemon"
        if self._rivals.lost(time.monotonic()):
            why = f"two daemons read {self._name} in turns, under one name. If one of them belongs to a copy of this "
            why += "node, run there: mailroom node new-id"
            log.error("links: %s", why)
            await self._fails_with("failing", why)
        return LEASE_S  # meanwhile the keeper finds out whether this daemon still leads

    async def _refused(self, error: Exception) -> float:
        why, failures = coded(str(error), error), self._fails()
        for_s = time.monotonic() - self._failed_at
        is_passing = isinstance(error, LinkRefused) and for_s < PATIENCE_S
        self.state = f"refused: {why}" if is_passing else f"stopped: {why}"
        if not is_passing:
            self._noted = True
            await self._target.receiving.transaction(stopping(self._target.schema, self._number, why, for_s))
            if self._told != why:
                log.error("links: %s is not read: %s", self._name, why)
                self._told = why
        return backoff.pause_s(failures, LONGEST_PAUSE_S if isinstance(error, LinkRefused) else LONGEST_STOP_S)

    async def _failed(self, error: Exception) -> float:
        self.state = f"failed: {type(error).__name__}"
        if self._told != self.state and not self.notes.stopping:
            self._tell(error)
            self._told = self.state
        await self._fails_with("failing", f"{type(error).__name__}: see the log of this node's dispatcher")
        return backoff.pause_s(self._failures, LONGEST_STOP_S)
