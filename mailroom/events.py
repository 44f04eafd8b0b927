"""Events: Mailroom reports what happens in its processes to listeners: metrics, traces, logs and your own hooks.

Each kind is a named tuple. An event is made only if its kind has a listener, so without listeners it costs
nothing. A listener is called where the event happens: in the thread of a handler, or in the event loop.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

from mailroom.errors import ConfigurationError
from mailroom.message.message import Message
from mailroom.session.repeats import Repeats

__all__ = [
    "AttemptFailed",
    "BatchClaimed",
    "BatchEnded",
    "BreakerTurned",
    "ClaimHeld",
    "DeliveryTraced",
    "ExecutablesExecuted",
    "HandlerBegan",
    "HandlerEnded",
    "LeadershipChanged",
    "MessagesDelivered",
    "MessagesExpired",
    "MessagesLost",
    "MessagesPublished",
    "MessagesReceived",
    "MessagesSent",
    "TriedAgain",
    "subscribe",
]

log = logging.getLogger("mailroom.events")


class MessagesSent(NamedTuple):
    """An `Outbox` has inserted messages. They exist if the caller's transaction commits, which it cannot know."""

    schema: str
    topics: Sequence[str]  # of the messages, in their order
    messages: int


class MessagesDelivered(NamedTuple):
    """A dispatcher has committed a delivery that took something. The counts are those of `dispatcher.Totals`."""

    schema: str
    taken: int
    delivered: int
    scheduled: int
    expired: int
    unrouted: int
    dead: int
    carried: int
    seconds: float


class DeliveryTraced(NamedTuple):
    """What `MessagesDelivered` tells, with the headers `traceparent` of up to 128 messages that were the oldest before.

    Only code that makes spans listens to it: the headers are read for it alone.
    """

    schema: str
    taken: int
    traceparents: Sequence[str]
    seconds: float


class ExecutablesExecuted(NamedTuple):
    """An executor has committed a batch that took something. The counts are those of `dispatcher.Executed`."""

    schema: str
    taken: int
    dead: int
    replied: int
    seconds: float


class MessagesReceived(NamedTuple):
    """A link has committed what it read of another node."""

    schema: str
    origin: str
    received: int
    delivered: int
    expired: int
    unrouted: int
    dead: int
    known: int
    seconds: float


class MessagesPublished(NamedTuple):
    """A broker has acknowledged what a bridge out of this node has published."""

    schema: str
    bridge: str
    published: int
    seconds: float


class MessagesExpired(NamedTuple):
    """The janitor has removed messages that waited in an inbox for longer than its `expire_s` allows."""

    schema: str
    inbox: str
    expired: int


class MessagesLost(NamedTuple):
    """The janitor has dropped messages of a log that an inbox had not read, as the log was told to (drop_unread)."""

    schema: str
    inbox: str
    log: str
    lost: int


class LeadershipChanged(NamedTuple):
    """A lane of a daemon leads from now on, or stands by."""

    schema: str
    role: str  # dispatcher, executor or links
    leads: bool
    epoch: int | None  # of its lease; None if it has never led


class BatchClaimed(NamedTuple):
    """A worker has taken messages in a transaction that is open. Claims that find nothing are not events."""

    schema: str
    inbox: str
    messages: Sequence[Message]
    due: bool  # the messages of a key that failed before
    seconds: float


class HandlerBegan(NamedTuple):
    """A handler is called next, in this thread or task: with one message, or with all of a batch."""

    schema: str
    inbox: str
    messages: Sequence[Message]


class HandlerEnded(NamedTuple):
    """The handler of the last `HandlerBegan` in this thread or task has returned, or raised `error`."""

    schema: str
    inbox: str
    messages: Sequence[Message]
    error: BaseException | None
    seconds: float


class BatchEnded(NamedTuple):
    """The transaction of a worker's batch has ended.

    `outcome` is "committed" or "rolled_back"; "unknown" if the connection was lost at the COMMIT.
    """

    schema: str
    inbox: str
    messages: Sequence[Message]
    due: bool
    outcome: str
    handled_s: Sequence[float]  # of each call of a handler that came back: with a message, or with all
    seconds: float  # from the call of the claim on


class AttemptFailed(NamedTuple):
    """A failure in a batch was recorded.

    `message` is the one to blame; None if that is not known, and all of the batch are tried one at a time. `outcome` is
    retry, park or skip; alone if no message is to blame.
    """

    schema: str
    inbox: str
    message: Message | None
    attempt: int
    outcome: str
    error: BaseException


class ClaimHeld(NamedTuple):
    """A loop of a worker has claimed nothing because of a limit of its inbox, and looks again after `seconds`."""

    schema: str
    inbox: str
    limit: str  # rate, concurrency or breaker
    seconds: float


class BreakerTurned(NamedTuple):
    """A worker has opened or closed the breaker of its inbox or of a prefix; an operator who closes it is not heard."""

    schema: str
    inbox: str
    is_open: bool
    prefix: str | None = None  # of whose keys it is the breaker; None if of the whole inbox


class TriedAgain(NamedTuple):
    """Something failed that no message is to blame for, and is tried again: mostly a database that does not answer."""

    schema: str
    role: str  # dispatcher, executor, links or worker
    inbox: str | None  # of a worker
    error: BaseException
    reconnects: bool  # over a new connection


Event: TypeAlias = (
    MessagesSent
    | MessagesDelivered
    | DeliveryTraced
    | ExecutablesExecuted
    | MessagesPublished
    | MessagesReceived
    | MessagesExpired
    | MessagesLost
    | LeadershipChanged
    | BatchClaimed
    | HandlerBegan
    | HandlerEnded
    | BatchEnded
    | AttemptFailed
    | ClaimHeld
    | BreakerTurned
    | TriedAgain
)
KINDS: tuple[type[Any], ...] = get_args(Event)
Listener: TypeAlias = Callable[[Any], object]

_changing = threading.Lock()
_listeners: dict[type[Any], tuple[Listener, ...]] = {}  # without an entry for kinds that have no listener
_failures = Repeats()


def subscribe(listener: Listener, *kinds: type[Any]) -> Callable[[], None]:
    """Call `listener(event)` for each event of these kinds, or of all, in this process; return what ends that.

    The listener is called where the event happens, so whatever waits for it waits too: it must return at once. It must
    not use the connection of a handler. What it raises is logged by its class, and disturbs nothing else. What it
    returns is ignored. Raises `ConfigurationError` for an async listener, or for what is not a kind of event.
    """
    if not callable(listener) or inspect.iscoroutinefunction(listener):
        raise ConfigurationError(
            "An event's listener is a plain function of one argument, the event. Start a task in it for async work.",
            code="MR-async-mismatch" if callable(listener) else "MR-invalid-handler",
        )
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigurationError(
            f"{unknown[0]!r} is not a kind of event; those are in mailroom.events.", code="MR-invalid-argument"
        )
    chosen = kinds or KINDS
    with _changing:
        for kind in chosen:
            _listeners[kind] = (*_listeners.get(kind, ()), listener)

    def end() -> None:
        with _changing:
            for kind in chosen:
                left = tuple(each for each in _listeners.get(kind, ()) if each is not listener)
                if left:
                    _listeners[kind] = left
                else:
                    _listeners.pop(kind, None)

    return end


def heard(kind: type[Any]) -> bool:
    """Return whether this kind of event has a listener: otherwise none has to be made."""
    return kind in _listeners


def emit(event: Event) -> None:
    """Call the listeners of an event."""
    for listener in _listeners.get(type(event), ()):
        try:
            listener(event)
        except Exception as error:
            # By its class only, since its text may have values of a message.
            name, failed = getattr(listener, "__qualname__", type(listener).__name__), type(error).__name__
            if (again := _failures.struck(f"{name} {failed}")) is not None:
                log.error("a listener of %s failed: %s in %s%s", type(event).__name__, failed, name, again)
