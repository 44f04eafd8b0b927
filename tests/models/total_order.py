"""The model of total order: an inbox that several nodes send to gives out one order, the same on every node.

Every node gives out the messages of a total inbox by (sent_clock, origin). So it may give out a message only if no node
can still send one with a smaller clock: if each of them has *shown* as much. S is the node that a message comes from, T
the node with the inbox. The rules:

- A link's rows come in the order of their clocks. So what T received last of S shows that all of S up to its clock is
  here (`shown`), and the least of what its origins have shown bounds the inbox (`bound`). T's own node needs no term:
  receiving raises T's clock beyond what was received, so what T stamps later has its place above the bound.
- What was given out once is never overtaken: `stable` only rises (`raised`), in the transaction that receives.
- A node that sends nothing shows nothing, so T asks for a *mark* while it holds messages that wait for one (`wanted`),
  and S answers with its clock (`answered`). Nobody asks for a mark on account of a mark, so idle nodes write nothing.
- Who joins sends nothing that is too late: T commits its clock as `since` first (`joining`), where the bound then
  stands. It asks S for a mark of that clock, and for the topic only when it has it (`has_joined`).
- What was excluded and included again may come too late, and never goes into the inbox then (`routed`).

The statements of `mailroom.order.total`, `mailroom.links.marks` and `dispatcher.links.receive` decide the same in SQL,
which `tests/links/test_order_sql.py` compares with these functions. `tests/links/test_order_simulation.py` shows by
worlds of nodes that the rules keep their promises.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum


def shown(received: int, since: Iterable[int]) -> int:
    """Return up to which clock all that an inbox wants of an origin is here.

    `received` is the sent_clock of the last row received from it, mark or message, 0 for none. `since` are those of the
    inbox's subscriptions to it, at least one: up to the least of them, nothing is wanted.
    """
    return max(received, min(since))


def bound(clock: int, shown: Iterable[int]) -> int:
    """Return up to which sent_clock a total inbox may be given out.

    `shown` has what each origin has shown that the inbox subscribes to, without those that are excluded. With none of
    them the inbox has this node's messages only, and all of these up to the node's `clock` are there.
    """
    return min(shown, default=clock)


def raised(stable: int, bound: int) -> int | None:
    """Return what becomes stable in this transaction, None if nothing does. It never falls, whatever the bound does."""
    return bound if bound > stable else None


# -- Marks ------------------------------------------------------------------------------------------------------------


def wanted(received: int, since: Collection[int], held: int, stable: int) -> int | None:
    """Return the clock that T asks an origin to show on behalf of an inbox, None if it need not ask.

    `received` and `since` are as in `shown`, `held` is the largest sent_clock in the inbox, 0 if it is empty, and
    `stable` the inbox's. Asked for are what lets the inbox be given out, the clock of each join, and of an origin that
    was included again a clock that does not stand below what was given out without it.
    """
    has = shown(received, since)
    least = max(*since, held if held > has else 0, stable if stable > has else 0)
    return least if least > received else None


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of kind H after the last of a link: the clock of S, which S raises to it in the same transaction.

    A `durable` one is visible to nobody before it is on disk. Otherwise S could lose its clock after T has relied on
    it.
    """

    sent_clock: int
    durable: bool


def answered(clock: int, wanted: int, last: int) -> Mark | None:
    """Return the mark by which S, at `clock`, answers a reader that wants `wanted`; None if it has shown that already.

    `last` is the sent_clock of the link's last row, 0 for none. It is decided under the dispatch lock.
    """
    return Mark(max(clock, wanted), durable=True) if wanted > last else None


# -- Who takes part ---------------------------------------------------------------------------------------------------


def joining(clock: int) -> int:
    """Return the `since` of a new subscription to another node: T, at `clock`, commits it before it asks S for a mark.

    Whatever T has given out or is about to has at most this clock, and from now on the bound stands there until S
    shows more.
    """
    return clock


def has_joined(received: int, since: int) -> bool:
    """Return whether T may ask S for the topic of a subscription: once S has shown its `since`.

    So S stamps for it only what is wanted. That holds even if S carries the topic already, for another inbox.
    """
    return received >= since


class Route(Enum):
    """Where a total inbox's message goes."""

    UNWANTED = "unwanted"
    DEAD_LETTER = "dead_letter"
    INBOX = "inbox"


def routed(sent_clock: int, since: int, stable: int) -> Route:
    """Return where a message goes that came by a subscription with `since`, for an inbox with this `stable`.

    A late one may have its place before what was given out, so it becomes a dead letter of the stage `order`.
    """
    if sent_clock <= since:
        return Route.UNWANTED
    if sent_clock <= stable:
        return Route.DEAD_LETTER
    return Route.INBOX


def is_stopped(incarnation: int, resumed: int) -> bool:
    """Return whether a node keeps its total inboxes stopped: its incarnation is newer than what was `resumed`.

    What it lost and stamps again has its old place at other nodes, so somebody has to say that the order goes on here.
    """
    return incarnation != resumed
