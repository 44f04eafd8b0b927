"""The ways out of a program: our endpoint, prometheus-client's registry, OpenTelemetry's meter say the same."""

from http.client import HTTPConnection
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mailroom import events
from mailroom.metrics import Collector, instrument, serve
from tests.metrics.test_process import message
from tests.support.node import Node


def happen() -> None:
    """What a worker tells of one batch."""
    batch = [message(sent_s=1, delivered_s=1)]
    events.emit(events.BatchClaimed("mailroom", "shipping", batch, False, 0.002))
    events.emit(events.BatchEnded("mailroom", "shipping", batch, False, "committed", [0.3], 0.5))


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a text, as Prometheus reads them; without ages, which are of the moment."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created") and "_age_" not in sample.name and "_wait_" not in sample.name
    }


def test_registry_and_endpoint_say_the_same(node: Node) -> None:
    collector = Collector(node.dsn)
    registry = CollectorRegistry()
    registry.register(collector)
    with serve("127.0.0.1:0", dsn=node.dsn) as endpoint:
        happen()
        connection = HTTPConnection("127.0.0.1", endpoint.port, timeout=60)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        ours = parsed(answer.read().decode())
        connection.close()
    theirs = parsed(generate_latest(registry).decode())
    collector.close()
    assert ours == theirs
    name = node.value("SELECT name FROM mailroom.node")
    reaped = ("mailroom_messages_reaped_total", (("inbox", "shipping"), ("node", name)))
    below = ("mailroom_handle_seconds_bucket", (("inbox", "shipping"), ("le", "0.5"), ("node", name)))
    assert (ours[reaped], ours[below]) == (1, 1)


def test_a_meter_is_given_the_same_numbers(node: Node) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    end = instrument(provider.get_meter("mailroom"), node.dsn)
    happen()
    found: dict[str, list[Any]] = {}
    units: dict[str, str | None] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found[metric.name] = list(metric.data.data_points)
                units[metric.name] = metric.unit
    end()
    provider.shutdown()
    [reaped] = found["mailroom.messages_reaped_total"]
    assert (reaped.value, reaped.attributes["inbox"]) == (1, "shipping")
    assert {point.attributes["le"]: point.value for point in found["mailroom.handle_seconds_bucket"]}["0.5"] == 1
    [took] = found["mailroom.handle_seconds_sum"]
    assert took.value == 0.3
    assert [units[f"mailroom.handle_seconds{part}"] for part in ("_sum", "_count")] == ["s", ""]
    [up] = found["mailroom.database_up"]
    assert (up.value, up.attributes["node"]) == (1, node.value("SELECT name FROM mailroom.node"))
