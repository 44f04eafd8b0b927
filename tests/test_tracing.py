"""Spans: those of one message find each other across the database, and none has a value."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags

from dispatcher import execute_all
from inbox import AsyncBatchHandler, AsyncWorker, Message, Worker
from mailroom import carrying, tracing
from outbox import Outbox, Outgoing, Store
from tests.support.node import Node
from tests.support.waiting import eventually, eventually_async
from tests.support.working import NEVER_S, working, working_async

pytestmark = pytest.mark.inbox("shipping", "order.paid", backoff_s=3_600)

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """What was made of spans, by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> Any:
        [span] = self.named(name)
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    end = tracing.instrument(found.provider)
    yield found
    end()


def headers(node: Node) -> list[Any]:
    return [found for (found,) in node.rows("SELECT headers FROM mailroom.outbox ORDER BY position")]


def test_a_trace_goes_from_a_request_through_the_database_to_what_a_handler_sends(node: Node, spans: Spans) -> None:
    with spans.tracer.start_as_current_span("POST /orders") as request:
        node.send("order.paid", {"card": "a secret"}, key="order-42")

    def handle(message: Message, connection: Any) -> None:
        with spans.tracer.start_as_current_span("inside"):
            Outbox().send(connection, "receipt", 1, key=message.key)

    node.deliver_all()
    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: spans.named("process shipping"))
    sent, handled, inside, then = (
        spans.one(name) for name in ("send order.paid", "process shipping", "inside", "send receipt")
    )
    assert (sent.kind, handled.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.parent.span_id == request.get_span_context().span_id
    assert [link.context.span_id for link in handled.links] == [sent.context.span_id]
    assert handled.parent is None
    assert (inside.parent.span_id, then.parent.span_id) == (handled.context.span_id, inside.context.span_id)
    [caused] = headers(node)
    assert caused["traceparent"].split("-")[1:3] == [f"{then.context.trace_id:032x}", f"{then.context.span_id:016x}"]
    delivered = spans.one("deliver")
    assert [link.context.span_id for link in delivered.links] == [sent.context.span_id]
    assert delivered.kind is SpanKind.CLIENT
    assert handled.attributes["messaging.destination.name"] == "order.paid"
    assert handled.attributes["mailroom.key"] == "order-42"
    assert "a secret" not in "".join(span.to_json() for span in spans.exporter.get_finished_spans())
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_batch_in_one_call_is_one_span_with_a_link_per_message(node: Node, spans: Spans) -> None:
    with node.connection.transaction():
        Outbox().send_many(node.connection, [Outgoing("order.paid", nth, key=str(nth)) for nth in range(3)])
    node.deliver_all()

    async def handle(messages: list[Message], _: Any) -> None:
        raise ValueError(f"a secret {messages[0].value}")

    async with working_async(
        AsyncWorker(node.dsn, "shipping", AsyncBatchHandler(handle), batch_s=None, poll_interval_s=NEVER_S)
    ):
        await eventually_async(lambda: spans.named("process shipping"))
    failed = spans.named("process shipping")[0]
    assert {link.context.span_id for link in failed.links} == {
        span.context.span_id for span in spans.named("send order.paid")
    }
    assert failed.attributes["messaging.batch.message_count"] == 3
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "ValueError")
    assert "a secret" not in failed.to_json()


def test_a_given_traceparent_is_kept_and_has_no_span(node: Node, spans: Spans) -> None:
    node.send("order.paid", headers={"traceparent": GIVEN})
    with carrying(traceparent=GIVEN):
        node.send("order.paid", headers={"mine": "1"})
    assert [found["traceparent"] for found in headers(node)] == [GIVEN, GIVEN]
    assert spans.named("send order.paid") == []


def test_what_is_not_sampled_makes_no_span_of_a_delivery(node: Node) -> None:
    found = Spans()
    end = tracing.instrument(TracerProvider(ALWAYS_OFF))
    try:
        node.send("order.paid")
        assert not int(headers(node)[0]["traceparent"][-2:], 16) & TraceFlags.SAMPLED
    finally:
        end()
    end = tracing.instrument(found.provider)
    try:
        node.deliver_all()
    finally:
        end()
    assert found.named("deliver") == []
    node.send("order.paid")
    assert headers(node) == [None]  # it has ended


def test_executables_are_applied_in_a_span(node: Node, spans: Spans) -> None:
    with node.connection.transaction():
        Store().put(node.connection, "key", b"value")
    execute_all(node.dsn)
    assert spans.one("apply").attributes["messaging.batch.message_count"] == 1


def test_a_second_call_takes_the_place_of_the_first(node: Node, spans: Spans) -> None:
    others = Spans()
    end = tracing.instrument(others.provider)
    node.send("order.paid", 1)
    end()
    assert not spans.named("send order.paid")
    assert others.one("send order.paid")


@pytest.mark.slow
def test_a_command_makes_spans_under_opentelemetry_instrument(node: Node) -> None:
    node.send("order.paid", 1, headers={"traceparent": GIVEN})
    found = subprocess.run(
        [Path(sys.executable).with_name("opentelemetry-instrument"), Path(sys.executable).with_name("mailroom"),
         "dispatcher", "deliver-all"],
        env=os.environ | {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none",
                          "OTEL_LOGS_EXPORTER": "none", "MAILROOM_DSN": node.dsn},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert '"name": "deliver"' in found.stdout
    assert GIVEN.split("-")[1] in found.stdout  # the link to the send
