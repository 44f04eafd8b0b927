"""The pages about a node as a whole: the overview, what leads and works, its routes and links, doctor and audit."""

import threading
import time
from typing import Any

from dispatcher.dashboard import charts
from dispatcher.dashboard.reading import (
    PAGE_ROWS,
    reading_executables,
    reading_failures,
    reading_routes,
    reading_scheduled,
    reading_subscriptions,
)
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from dispatcher.executor.targets.registration import Registrations
from mailroom.bridges.bridges import Bridges
from mailroom.doctor.examining import examine
from mailroom.doctor.finding import Finding
from mailroom.figures.audit import reading_audit
from mailroom.links.links import Links
from mailroom.metrics import minute_statistics
from mailroom.node.status import executor_status
from mailroom.node.workers import at_work
from mailroom.sql.runner import run
from mailroom.values.names import topic_name
from outbox.periodic.periodic import Periodic

MINUTES = 60
IN_TROUBLE = 20
FINDINGS_S = 5.0


def overview(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return what is in trouble, throughput and lag."""
    look = node.look()
    with node.reading() as connection:
        minutes = minute_statistics(connection, None, since_m=MINUTES, schema=node.schema)
        failures = run(connection, reading_failures(node.schema))
    times, *rates = zip(*node.looks.rates, strict=True) if node.looks.rates else ((),)
    return {
        "look": look,
        "in_trouble": [each for each in look.inboxes if each.is_in_trouble][:IN_TROUBLE],
        "troubled": sum(each.is_in_trouble for each in look.inboxes),
        "paused": sum(each.paused for each in look.inboxes),
        "oldest_s": max((each.oldest_s for each in look.inboxes), default=0.0),
        "waiting": None
        if any(each.waiting is None for each in look.inboxes)
        else sum(each.waiting or 0 for each in look.inboxes),
        "minutes": minutes,
        "failures": failures,
        "delivered": charts.bars(
            [(each.minute, float(each.delivered)) for each in minutes], look.at, MINUTES, "messages delivered"
        ),
        "rates": charts.lines(rates, times, ("sent", "delivered", "reaped"), "messages/s"),
    }


def workers(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return who leads and who stands by, the workers, and the batches that they have in hand."""
    look = node.look()
    with node.reading() as connection:
        return {"look": look, "found": at_work(connection, schema=node.schema)}


def waiting(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return scheduled messages, the next due first, and periodic ones."""
    at, after = asked.time("at"), asked.number("after") or 0
    look = node.look()
    with node.reading() as connection:
        scheduled, more = page_of(run(connection, reading_scheduled(node.schema, at, after)))
        periodic = Periodic(schema=node.schema).list(connection)
    return {"look": look, "scheduled": scheduled, "more": more, "periodic": periodic, "first": at is None}


def executables(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return the executor, executables that wait, and what they may reach."""
    after = asked.number("after")
    look = node.look()
    registrations = Registrations(schema=node.schema)
    with node.reading() as connection:
        executor = executor_status(connection, schema=node.schema)
        found, more = page_of(run(connection, reading_executables(node.schema, -1 if after is None else after)))
        targets, functions = registrations.targets(connection), registrations.functions(connection)
    return {"look": look, "executor": executor, "found": found, "more": more, "targets": targets,
            "functions": functions, "first": after is None}  # fmt: skip


def links(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return the nodes that this one reads or is read by, and its bridges to brokers."""
    look = node.look()
    with node.reading() as connection:
        states = Links(schema=node.schema).status(connection)
        bridges = Bridges(schema=node.schema).status(connection)
    return {"look": look, "states": states, "bridges": bridges}


def routes(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return who gets a topic and why, or all subscriptions."""
    topic = asked.text("topic")
    look = node.look()
    if topic is not None:
        topic_name(topic)
    behind = "link" in asked.fields, asked.fields.get("name", "")
    after = asked.fields.get("t", ""), asked.fields.get("i", ""), asked.fields.get("o", "")
    with node.reading() as connection:
        found = run(connection, reading_routes(node.schema, topic, behind)) if topic else []
        subscriptions, more = page_of(run(connection, reading_subscriptions(node.schema, after)))
    shown, more_routes = page_of(found)
    return {"look": look, "topic": topic, "routes": shown, "more_routes": more_routes, "first_routes": not behind[1],
            "subscriptions": subscriptions, "more": more, "first": not after[0]}  # fmt: skip


def audit(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return what was done by hand, the newest first."""
    before = asked.number("before")
    look = node.look()
    with node.reading() as connection:
        rows, more = page_of(run(connection, reading_audit(node.schema, before=before, limit=PAGE_ROWS + 1)))
    return {"look": look, "rows": rows, "more": more, "first": before is None}


class Doctor:
    """Its findings: one examination at a time, and kept for some seconds, however many people ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[float, list[Finding]] | None = None

    def page(self, node: ShownNode, asked: Asked) -> dict[str, Any]:
        """Return the page, which asks for the findings: on a large node they take longer than a page should."""
        return {"look": node.look()}

    def findings(self, node: ShownNode, asked: Asked) -> dict[str, Any]:
        """Return the findings."""
        with self._lock:
            if self._found is None or time.monotonic() - self._found[0] > FINDINGS_S:
                with node.reading() as connection, connection.transaction():
                    found = examine(connection, schema=node.schema)
                self._found = time.monotonic(), found
            look = node.look()
            return {"look": look, "findings": self._found[1], "inboxes": {each.name for each in look.inboxes}}
