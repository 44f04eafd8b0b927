"""A logical clock for programs of their own: Lamport's scalar clock, as nodes have it."""

from dataclasses import dataclass

from mailroom.order.clock import MAX_CLOCK, receive, tick
from mailroom.values.numbers import whole


@dataclass(frozen=True, slots=True)
class Stamp:
    """An event in the history of a `LamportClock`: its clock, and what happened, as the caller named it.

    `is_stale` of a received message: it was sent at a clock that this one had reached already, so the clocks alone do
    not say whether it came late. It was received like any other.
    """

    clock: int
    what: object = None
    is_stale: bool = False


class LamportClock:
    """Lamport's logical clock of one process: dapcomp's scalar time, by the rules that the clocks of nodes follow.

    Call `tick` before each send or internal event, and send its clock with the message; call `receive` with that clock
    for each message that arrives. Then an event has a smaller clock than every event that it may have caused. The
    reverse does not hold: two events with different clocks may know nothing of each other. Events of two processes may
    have one clock; by (clock, process) they have a total order.

    `clock` is where it begins, from 0 to 2^63 - 1, and `step` is dapcomp's d, by which it goes on: 1 unless there is a
    reason. Raises `ValueError` for any others. Not for several threads at once.
    """

    def __init__(self, clock: int = 0, *, step: int = 1) -> None:
        """Begin at `clock`, with an empty history."""
        self._clock = whole(clock, "clock", 0, MAX_CLOCK, ValueError)
        self._step = whole(step, "step", 1, MAX_CLOCK, ValueError)
        self._history: list[Stamp] = []

    @property
    def clock(self) -> int:
        """The clock of the last event, or where the clock began."""
        return self._clock

    @property
    def history(self) -> list[Stamp]:
        """All events so far, in their order: a copy."""
        return list(self._history)

    def tick(self, what: object = None) -> int:
        """Rule 1, before a send or an internal event: go on by a step, note `what` happens, and return the clock.

        Raises `mailroom.order.clock.ClockOverflow`, and notes nothing, if the clock would exceed 2^63 - 1.
        """
        return self._note(Stamp(tick(self._clock, self._step), what)).clock

    def receive(self, sent_clock: int, what: object = None) -> Stamp:
        """Rule 2, on receiving a message that was sent at `sent_clock`: go on beyond both clocks, and note it.

        No message is dropped: one that is stale says so in its stamp. Raises `ValueError` for what is not a clock, and
        `mailroom.order.clock.ClockOverflow` as `tick` does.
        """
        sent_clock = whole(sent_clock, "sent_clock", 0, MAX_CLOCK, ValueError)
        return self._note(Stamp(receive(self._clock, sent_clock, self._step), what, sent_clock <= self._clock))

    def _note(self, stamp: Stamp) -> Stamp:
        self._clock = stamp.clock
        self._history.append(stamp)
        return stamp

    def __repr__(self) -> str:
        """Say where it is."""
        return f"LamportClock({self._clock}, step={self._step})"
