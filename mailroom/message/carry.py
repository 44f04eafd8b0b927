"""Carried headers: they pass from the message in hand to all that is sent while it is handled, and on from there.

So all effects of a message have its saga, user and trace, although no handler passes them on. The header `causation`
names the message that caused them.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypedDict, Unpack
from uuid import UUID

from mailroom.errors import InvalidMessage
from mailroom.message.headers import as_json, checked, size
from mailroom.values.names import MAX_HEADERS_BYTES, shown

log = logging.getLogger("mailroom.carry")

MAX_CARRIED_BYTES = 4 * 1024  # so that what is carried leaves room for a message's own headers
CAUSATION = "causation"
NONE: Mapping[str, str] = MappingProxyType({})


class CarriedHeaders(TypedDict, total=False):
    """The headers that are carried. If not all of them fit, earlier ones come first."""

    saga: str
    user: str
    tenant: str
    transactions: str
    related_services: str
    traceparent: str
    tracestate: str
    baggage: str


NAMES = tuple(CarriedHeaders.__annotations__)


class Cause(Protocol):
    """The part of a message that decides what is carried on; an `inbox.Message` has it."""

    @property
    def id(self) -> UUID:
        """The message's id, which becomes the header `causation`."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers."""
        ...


@dataclass(slots=True)
class _InHand:
    """The message in hand. Its headers are read at the first send, since most handlers send nothing."""

    cause: Cause
    logged: frozenset[str] = frozenset()  # names whose loss was logged: once a message, however much it sends
    _carried: list[tuple[str, str, int]] | None = None

    @property
    def carried(self) -> list[tuple[str, str, int]]:
        """Its carried headers in the order of `CarriedHeaders`, each with its size."""
        if self._carried is None:
            found = self.cause.headers
            # Checked, since it may be a request of the caller's own making; a delivered message's headers are texts.
            carried = checked({name: found[name] for name in NAMES if name in found})
            self._carried = [(name, value, size({name: value})) for name, value in carried.items()]
        return self._carried

    def log_lost(self, left: list[str]) -> None:
        """Log the names of headers that do not go on."""
        if new := [name for name in left if name not in self.logged]:
            self.logged |= {*new}
            log.warning(
                "Message %s: what is sent while it is handled goes without its headers %s, which do not fit into the "
                "%d bytes of carried headers, or beside the other headers.",
                self.cause.id, ", ".join(new), MAX_CARRIED_BYTES,
            )  # fmt: skip


class _Carrier:
    """What a send adds to its headers: those of `carrying`, then those of the message in hand, as far as they fit.

    A `block` of `carrying` has made it, inside of which it took the place of `outer`. `_cause` is the message in hand,
    and `_in_hand` what is known of it, from the first send on: a worker makes a carrier for each message.
    """

    __slots__ = ("_alone", "_cause", "_in_hand", "_is_known", "block", "explicit", "outer")

    def __init__(
        self, explicit: Mapping[str, str], cause: Cause | None = None, block: object = None,
        outer: "_Carrier | None" = None,
    ) -> None:  # fmt: skip
        self.explicit = explicit
        self._cause = cause
        self._in_hand: _InHand | None = None
        self.block = block
        self.outer = outer
        self._alone: str | None = None
        self._is_known = False

    @property
    def in_hand(self) -> _InHand | None:
        """What is known of the message in hand; one for it and all blocks of `carrying` inside."""
        if self._in_hand is None and self._cause is not None:
            self._in_hand = _InHand(self._cause) if self.outer is None else self.outer.in_hand
        return self._in_hand

    def as_json(self, given: Mapping[str, str] | None) -> str | None:
        """Return the headers of a message that is given these as JSON; computed once for all that are given none."""
        if given is not None:
            return as_json(self.onto(checked(given)))
        if not self._is_known:
            self._alone, self._is_known = as_json(self.onto({})), True
        return self._alone

    def adding(self, headers: Mapping[str, str], block: object) -> "_Carrier":
        """Return this one with the headers of a block of `carrying`. Raises `InvalidMessage` if they are too many."""
        explicit = {**self.explicit, **headers}
        if (found := size(explicit)) > MAX_CARRIED_BYTES:
            raise InvalidMessage(
                f"The carried headers have {found} bytes as JSON; {MAX_CARRIED_BYTES} are allowed. "
                "Put large data into a value.",
                code="MR-headers-too-large",
            )
        return _Carrier(explicit, self._cause, block, self)

    def onto(self, given: dict[str, str]) -> dict[str, str]:
        """Return the headers of a message that is given these. Some may be left out: no handler may fail by them."""
        explicit = {name: value for name, value in self.explicit.items() if name not in given}
        headers = given | explicit
        in_hand = self.in_hand
        if in_hand is None:
            return headers
        room, carried_room = MAX_HEADERS_BYTES - size(headers), MAX_CARRIED_BYTES - size(explicit)
        cause = {CAUSATION: str(in_hand.cause.id)}
        if CAUSATION not in headers and size(cause) <= room:
            headers |= cause
            room -= size(cause)
        left = []
        for name, value, bytes_ in in_hand.carried:
            if name in headers:
                continue
            if bytes_ > min(room, carried_room):
                left.append(name)
                continue
            headers[name] = value
            room, carried_room = room - bytes_, carried_room - bytes_
        if left:
            in_hand.log_lost(left)
        return headers


# A context and not a thread: the handlers of an AsyncWorker's loops take turns within one thread.
# D-messages-3: Carried headers are read at the send.
_carrier: ContextVar[_Carrier] = ContextVar("mailroom_carrier", default=_Carrier(NONE))  # noqa: B039  # carries nothing


class _Within:
    """A `with` block inside which sends carry something else, whatever `carrying` was left open in it.

    Not a generator's: a worker enters one per message.
    """

    __slots__ = ("_token",)
    _token: Token[_Carrier]

    def _made(self, outer: _Carrier) -> _Carrier:
        raise NotImplementedError

    def __enter__(self) -> object:
        self._token = _carrier.set(self._made(_carrier.get()))
        return None

    def __exit__(self, *_: object) -> None:
        _carrier.reset(self._token)


class handling(_Within):  # noqa: N801  # used as contextlib's are
    """Send inside this context the effects of the message, and carry nothing from outside of it.

    So a handler begins with its message alone: in a worker's thread, in its task and in a test. Without a message
    nothing is carried. One context may serve many messages in turn: it gives the function that turns to each.
    """

    __slots__ = ("_cause",)

    def __init__(self, message: Cause | None = None) -> None:
        self._cause = message

    def __enter__(self) -> Callable[[Cause], None]:
        super().__enter__()
        return self._turn_to

    def _turn_to(self, message: Cause) -> None:
        _carrier.set(_Carrier(NONE, message))

    def _made(self, outer: _Carrier) -> _Carrier:
        return _Carrier(NONE, self._cause)


class answering(_Within):  # noqa: N801
    """Send inside this context the answer to a request, which is its cause and need not be the message in hand."""

    __slots__ = ("_cause",)

    def __init__(self, request: Cause) -> None:
        self._cause = request

    def _made(self, outer: _Carrier) -> _Carrier:
        return _Carrier(outer.explicit, self._cause)


class carrying:  # noqa: N801
    """Give these headers to everything that is sent inside this `with` block, and to what that causes.

    They are saga, user, tenant, transactions, related_services, traceparent, tracestate and baggage: texts, at most 4
    KiB as JSON, together with those of the blocks around this one. One object may be entered again, by many at once.
    Headers given to a send win over them, and they win over those of the message in hand. In a handler the block is the
    handler's own: it ends with the handler at the latest. Tasks, and `asyncio.to_thread`, begun inside inherit it;
    threads of your own and `run_in_executor` do not (`contextvars.copy_context().run`). They are only the sender's word
    and prove no identity. Raises `InvalidMessage`.
    """

    __slots__ = ("_headers",)

    def __init__(self, **headers: Unpack[CarriedHeaders]) -> None:
        if unknown := sorted(set(headers) - set(NAMES)):
            raise InvalidMessage(
                f"Header {shown(unknown[0])} is not carried; these are: {', '.join(NAMES)}. "
                "Give it to each send, as one of its headers.",
                code="MR-header-not-carried",
            )
        self._headers = checked(headers)  # type: ignore[arg-type]  # a TypedDict of texts is a mapping of texts

    def __enter__(self) -> None:
        _carrier.set(_carrier.get().adding(self._headers, self))

    def __exit__(self, *_: object) -> None:
        # Nothing is kept in the object, which other threads and tasks may enter, too. A generator may leave its block
        # after the handler has ended, and another one has begun: that ends nothing.
        found = _carrier.get()
        if found.block is self and found.outer is not None:
            _carrier.set(found.outer)


def is_given(name: str) -> bool:
    """Return whether a block of `carrying` gives this header to what is sent now."""
    return name in _carrier.get().explicit


def headers_json(given: Mapping[str, str] | None) -> str | None:
    """Return the headers of a message that is sent now, as JSON: those given, and those carried.

    Raises `InvalidMessage` for given ones that cannot be sent.
    """
    return _carrier.get().as_json(given)
