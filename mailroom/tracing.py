"""Spans of OpenTelemetry along the path of a message, which cross the database in its headers.

`send TOPIC` (PRODUCER) puts its context into the header `traceparent`. `process INBOX` (CONSUMER) is linked to that
one, and is the current span of the handler, so what it sends is caused by it. `deliver` (CLIENT) is linked to the
sampled ones among the messages that a delivery is about to take. `apply` and `receive ORIGIN` are those of executables
and links. Polls, renewals and claims that find nothing have none. Attributes follow the conventions for messaging.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from importlib.metadata import version
from typing import TYPE_CHECKING

from mailroom import events
from mailroom.message import carry, outgoing
from mailroom.message.message import Message

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Tracer, TracerProvider

__all__ = ["Instrumentor", "instrument"]

MAX_LINKS = 128
SCHEMA_URL = "https://opentelemetry.io/schemas/1.36.0"
NS = 1_000_000_000


def _nothing() -> None:
    """End nothing: this process makes no spans."""


_end: Callable[[], None] = _nothing


def instrument(provider: "TracerProvider | None" = None) -> Callable[[], None]:
    """Make spans of what this process sends, delivers, executes, receives and handles; return what ends that.

    `provider` is OpenTelemetry's, None for its global one; it decides what is sampled and where spans go. Needs
    opentelemetry-api: `pip install 'pg-mailroom[otel]'`. A send that is given `traceparent`, by hand or by
    `mailroom.carrying`, keeps it, and has no span. A span holds ids, topics, inboxes and keys, and no values. A second
    call takes the place of the first.
    """
    global _end
    from opentelemetry import trace

    _end()
    spans = _Spans(trace.get_tracer("mailroom", version("pg-mailroom"), provider, SCHEMA_URL))
    outgoing.tracing = spans.sent
    end_hearing = [
        events.subscribe(spans.began, events.HandlerBegan),
        events.subscribe(spans.ended, events.HandlerEnded),
        events.subscribe(spans.delivered, events.DeliveryTraced),
        events.subscribe(spans.executed, events.ExecutablesExecuted),
        events.subscribe(spans.received, events.MessagesReceived),
    ]

    def end() -> None:
        if outgoing.tracing == spans.sent:
            outgoing.tracing = None
        for each in end_hearing:
            each()

    _end = end
    return end


class Instrumentor:
    """Has `opentelemetry-instrument` call `instrument`, so that our commands make spans without a program.

    For example `opentelemetry-instrument mailroom dispatcher run`. It has the two methods of its `BaseInstrumentor`
    that are called, so that package is not needed for ours.
    """

    def instrument(self, *, tracer_provider: "TracerProvider | None" = None, **_given: object) -> None:
        """Call `instrument` with the tracer's provider; other arguments are ignored."""
        instrument(tracer_provider)

    def uninstrument(self, **_given: object) -> None:
        """End that."""
        _end()


# The span of the handler that runs in this thread or task, and what sets the context back after it.
_handled: "ContextVar[tuple[Span, Token[Context]] | None]" = ContextVar("mailroom_span", default=None)


class _Spans:
    def __init__(self, tracer: "Tracer") -> None:
        from opentelemetry import context, propagate, trace

        self._tracer = tracer
        self._context = context
        self._propagate = propagate
        self._trace = trace
        self._kind = trace.SpanKind

    def sent(self, message: outgoing.Outgoing) -> Mapping[str, str] | None:
        """Return the headers of a message that is sent, with the context of its span."""
        given = message.headers
        if (given is not None and "traceparent" in given) or carry.is_given("traceparent"):
            return given
        attributes = {
            **_attributes("send", message.topic),
            **({} if message.key is None else {"mailroom.key": str(message.key)}),
            **({} if message.id is None else {"messaging.message.id": str(message.id)}),
        }
        span = self._tracer.start_span(f"send {message.topic}", kind=self._kind.PRODUCER, attributes=attributes)
        headers: dict[str, str] = dict(given or {})
        self._propagate.inject(headers, self._trace.set_span_in_context(span))
        span.end()
        return headers or None

    def began(self, event: events.HandlerBegan) -> None:
        """Begin the span of a handler, and make it the current one."""
        first = event.messages[0]
        attributes = {
            **_attributes("process", first.topic), "messaging.destination.subscription.name": event.inbox,
        }  # fmt: skip
        if len(event.messages) == 1:
            attributes |= {
                "messaging.message.id": str(first.id), "mailroom.key": first.key, "mailroom.clock": first.clock,
            }  # fmt: skip
        else:
            attributes["messaging.batch.message_count"] = len(event.messages)
        span = self._tracer.start_span(
            f"process {event.inbox}", self._context.Context(), self._kind.CONSUMER, attributes,
            links=self._links(_parents(event.messages)),
        )  # fmt: skip
        _handled.set((span, self._context.attach(self._trace.set_span_in_context(span))))

    def ended(self, event: events.HandlerEnded) -> None:
        """End it. Of an error the span has the class, since its text may hold values."""
        if (found := _handled.get()) is None:
            return
        span, token = found
        _handled.set(None)
        self._context.detach(token)
        if event.error is not None:
            span.set_attribute("error.type", type(event.error).__qualname__)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        span.end()

    def delivered(self, event: events.DeliveryTraced) -> None:
        """Tell of a delivery of which something is sampled."""
        if links := [link for link in self._links(event.traceparents) if link.context.trace_flags.sampled]:
            attributes = {**_attributes("deliver"), "messaging.batch.message_count": event.taken}
            self._past("deliver", self._kind.CLIENT, attributes, event.seconds, links)

    def executed(self, event: events.ExecutablesExecuted) -> None:
        """Tell of a batch of executables."""
        attributes = {**_attributes("apply"), "messaging.batch.message_count": event.taken}
        self._past("apply", self._kind.CLIENT, attributes, event.seconds)

    def received(self, event: events.MessagesReceived) -> None:
        """Tell of what was received of another node."""
        attributes = {**_attributes("receive", event.origin), "messaging.batch.message_count": event.received}
        self._past(f"receive {event.origin}", self._kind.CONSUMER, attributes, event.seconds)

    def _past(
        self, name: str, kind: "SpanKind", attributes: Mapping[str, str | int], seconds: float,
        links: "Sequence[Link]" = (),
    ) -> None:  # fmt: skip
        now = time.time_ns()
        start = now - int(seconds * NS)
        span = self._tracer.start_span(name, self._context.Context(), kind, attributes, links, start_time=start)
        span.end(now)

    def _links(self, traceparents: Iterable[str]) -> "list[Link]":
        found = []
        for traceparent in traceparents:
            context = self._propagate.extract({"traceparent": traceparent}, self._context.Context())
            sender = self._trace.get_current_span(context).get_span_context()
            if sender.is_valid:
                found.append(self._trace.Link(sender))
        return found


def _attributes(operation: str, destination: str | None = None) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {"messaging.system": "mailroom", "messaging.operation.name": operation}
    if operation in ("send", "process", "receive"):
        attributes["messaging.operation.type"] = operation
    return attributes if destination is None else attributes | {"messaging.destination.name": destination}


def _parents(messages: Sequence[Message]) -> Iterable[str]:
    for message in messages[:MAX_LINKS]:
        if traceparent := message.headers.get("traceparent"):
            yield traceparent
