"""What a broker loses though it had it: logs that are cut back, put back to a copy, or made anew; and the operator.

A bridge has to say so before it reads on, and to stand until somebody resumes it. The operator does what the text and
the guide say. What may be missing afterwards is what the broker has lost, as it stood on its disk, and nothing else.
"""

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from uuid import UUID

from tests.faults.bridges.broker import Auditor, CampaignBroker
from tests.faults.bridges.checks import BRIDGED, EXACTLY, FOREIGN, LEAST, PARTITIONS, Place
from tests.faults.bridges.load import ForeignWriter
from tests.faults.bridges.nodes import InNode, OutNode, into
from tests.faults.bridges.segments import Partition
from tests.faults.links.strikes import Tally
from tests.faults.links.struck import LOST

NOTICED_WITHIN_S = 120.0
TAIL = 6  # batches, of which one is the first that is cut off
TORN = 40  # bytes of it that may stay
PROMPT = "mailroom bridge resume"
WHERE = re.compile(r"--at (\w+)/(\d+)=(\d+)")
LACKING = "the log was cut back, or made anew"  # says who published there


@dataclass
class Operator:
    """Waits for a bridge to say what is lost, and resumes it. `of_out` and `of_into` are the nodes."""

    of_out: OutNode
    of_into: InNode
    tally: Tally

    def resumes_into(self, why: str, at: Mapping[Place, int]) -> None:
        """Resume at these places the bridges that have to stop there for that reason: each names one place at a time.

        One place that is named stands for the others of a topic that was made anew, or put back.
        """
        left, deadline = dict(at), time.monotonic() + NOTICED_WITHIN_S
        while left:
            place = next(iter(left))
            said = self._said(lambda place=place: self.of_into.why_stopped(place[0]), f"{place}: {why}")  # type: ignore[misc]  # called at once
            if not said:
                return
            named = WHERE.search(said)
            there = (named[1], int(named[2])) if named else place
            # Who has looked before it was resumed, and notes that after it, is put right by its next look.
            if there in at and there not in left and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            if named is None or f"{PROMPT} {into(place[0])}" not in said or there not in left:
                self.tally.violations.append(f"{place}: {why}, and it says: {said}")
                return
            self.of_into.set_to(there, left.pop(there))

    def resumes_out(self, topic: str) -> None:
        """Resume the bridge that has to say that its broker has lost what it had acknowledged."""
        if self._said(lambda: self.of_out.why_stopped(topic), f"the mark of {topic} was put back"):
            self.of_out.resume(topic)
            self.tally.did("publisher told that its mark was put back")

    def _said(self, ask: Callable[[], str], what: str) -> str:
        deadline = time.monotonic() + NOTICED_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(*LOST):
                if said := ask():
                    return said
            time.sleep(0.05)
        self.tally.violations.append(f"{what}, and nobody says so in {NOTICED_WITHIN_S:.0f} s")
        return ""


@dataclass
class Losses:
    """Makes the broker lose something. `standing` has the reader's daemons stand before they begin, or not at all."""

    broker: CampaignBroker
    auditor: Auditor
    foreign: ForeignWriter
    operator: Operator
    standing: Callable[[], AbstractContextManager[bool]]
    left_out: Callable[[Collection[Place]], Collection[UUID]]
    tally: Tally
    dice: random.Random
    lost: set[UUID] = field(default_factory=set)  # of this round
    had: set[UUID] = field(default_factory=set)  # what was in a log that is another one now
    keeps: threading.Event = field(default_factory=threading.Event)  # what bridges publish; see `keep`
    lacking: set[str] = field(default_factory=set)  # topics whose publishers may find out that something is gone
    turn: threading.Lock = field(default_factory=threading.Lock)  # one loss after the other

    def keep(self) -> None:
        """Keep what bridges publish until the next round: who is put back finds there what it has lost."""
        with self.turn:
            self.keeps.set()

    def forget(self) -> None:
        """Begin a new round."""
        self.lost.clear()
        self.had.clear()
        self.keeps.clear()

    def resume_publishers(self) -> None:
        """Resume those that stand since a log that has lost something lacks what it had acknowledged.

        It is seen when they begin, so it may be in a later round. Who says so of another topic stands until the end.
        """
        for topic in sorted(self.lacking):
            if LACKING in self.operator.of_out.why_stopped(topic):
                self.operator.of_out.resume(topic)
                self.tally.did("publisher told that its log had lost records")

    def _topics(self) -> list[str]:
        return [topic for topic in PARTITIONS if topic == FOREIGN or not self.keeps.is_set()]

    @contextlib.contextmanager
    def _at_rest(self, *, stands: bool) -> Iterator[bool]:
        """Have nothing of the campaign's own on its way to the broker; with `stands` nobody takes anything in."""
        with self.foreign.turn, ExitStack() as stack:
            yield stack.enter_context(self.standing()) if stands else True

    # -- A log that is cut back ---------------------------------------------------------------------------------------

    def cut_back(self) -> None:
        """Kill a server and take the end of a log away, as a power cut does; it grows again from there."""
        stands = self.dice.random() < 0.5
        with self.turn:
            cut = self._cut(stands=stands)
            if cut is None:
                self.tally.missed_one()
                return
            place, offset, at = cut
            self.tally.did(f"log cut back {'before it is read on' if stands else 'while it is read'}")
            if at > offset:
                again = self.dice.random() < 0.5 and place[0] != FOREIGN
                self.operator.resumes_into(f"cut back to {offset}, read to {at}", {place: 0 if again else offset})

    def _cut(self, *, stands: bool) -> tuple[Place, int, int] | None:
        with self._at_rest(stands=stands) as stood:
            # Where nothing was taken in since somebody set the position, there is nothing to compare.
            known = self.operator.of_into.known()
            places = [place for place in known if place[0] in self._topics()]
            if not stood or not places:
                return None
            place = self.dice.choice(places)
            with self.broker.down:
                server, folder = self.broker.at(place)
                server.kill()
                try:
                    found = self._cut_file(Partition(folder), None if stands else known[place])
                finally:
                    server.start()
            if found is None:
                return None
            offset, gone = found
            self._note({place: offset}, gone)
            self.lacking |= {place[0]} & set(BRIDGED)
            return place, offset, known[place]

    def _cut_file(self, partition: Partition, below: int | None) -> tuple[int, Collection[UUID]] | None:
        """Cut the log before one of its last batches, so that no transaction is left open; return from which offset."""
        batches = [each for each in partition.closed()[1:] if below is None or each.first < below][-TAIL:]
        if not batches:
            return None
        first = self.dice.choice(batches)
        os.truncate(first.file, first.place + self.dice.choice((0, self.dice.randrange(TORN))))
        for file in first.file.parent.glob("*.log"):
            if file.name > first.file.name:
                os.truncate(file, 0)
        return first.first, partition.records(first.first).values()

    # -- All of it put back --------------------------------------------------------------------------------------------

    def put_back(self, meanwhile: Callable[[], object]) -> None:
        """Copy what the broker keeps, and put it back to that a while later."""
        with self.turn:
            if self.keeps.is_set() or not self.broker.has_group(self.operator.of_out.own_id(EXACTLY)):
                self.tally.missed_one()
                return
            with self.broker.down:
                self.broker.copy()
            meanwhile()
            with self._at_rest(stands=True) as stood:
                if not stood:
                    self.tally.missed_one()
                    return
                known, marked = self.operator.of_into.known(), self.operator.of_out.marked(EXACTLY)
                with self.broker.down:
                    for server in self.broker.servers:
                        server.kill()
                    before = self._partitions()
                    self.broker.put_back()
                    after = self._partitions()
                    for server in self.broker.servers:
                        server.start()
                ends = {place: partition.end for place, partition in after.items()}
                self._note(ends, {id for p, old in before.items() for id in old.records(ends[p]).values()})
            self.tally.did("broker put back")
            self.operator.resumes_into("put back", {p: end for p, end in ends.items() if known.get(p, 0) > end})
            self.lacking.add(LEAST)
            if marked > max(partition.clock for (topic, _), partition in after.items() if topic == EXACTLY):
                self.operator.resumes_out(EXACTLY)
            self.lacking.add(EXACTLY)

    def _partitions(self) -> dict[Place, Partition]:
        return {place: Partition(self.broker.at(place)[1]) for place in self.auditor.places}

    # -- Another topic of the same name --------------------------------------------------------------------------------

    def make_anew(self) -> None:
        """Delete a topic and make it anew: the bridges read nothing there before somebody says so."""
        stands = self.dice.random() < 0.5
        with self.turn:
            topic = self.dice.choice(self._topics())
            with self._at_rest(stands=stands) as stood:
                known = {place: at for place, at in self.operator.of_into.known().items() if place[0] == topic}
                if not stood or len(known) < PARTITIONS[topic]:
                    self.tally.missed_one()
                    return
                with self.broker.down:
                    old = self.broker.made_anew(topic)
                gone = {id for place, partition in old.items() for id in partition.records(known[place]).values()}
                self.had |= {id for partition in old.values() for id in partition.records(0).values()}
                self._note(dict.fromkeys(old, 0), gone)
                self.lacking |= {topic} & set(BRIDGED)
            self.tally.did(f"topic made anew {'before it is read on' if stands else 'while it is read'}")
            self.operator.resumes_into("made anew", dict.fromkeys(old, 0))

    def _note(self, ends: Mapping[Place, int], gone: Collection[UUID]) -> None:
        self.lost |= set(gone) | set(self.left_out(ends))
        for place, end in ends.items():
            self.auditor.forget(place, end)
        self.foreign.renew()
