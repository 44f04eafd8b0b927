"""Bridges to NATS without a node, and what they publish."""

from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from dispatcher.bridges import tending
from mailroom.bridges.publisher import OutBridge
from mailroom.bridges.record import Form, Record
from mailroom.bridges.settings import OutSettings


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bridges note trouble at once, and try again soon."""
    for name, seconds in (("PATIENCE_S", 0.05), ("LONGEST_PAUSE_S", 0.1), ("LONGEST_STOP_S", 0.3), ("LEASE_S", 0.1)):
        monkeypatch.setattr(tending, name, seconds)
    monkeypatch.setattr("dispatcher.bridges.taking.WAIT_S", 0.04)
    monkeypatch.setattr("dispatcher.bridges.nats.client.RECONNECT_S", 0.05)


def a_bridge(url: str, stream: str, options: Mapping[str, str] | None = None) -> OutBridge:
    """Return a bridge of no node, to all subjects of the stream."""
    settings = OutSettings("nats", url, Form(f"{stream}.{{topic}}"))
    return OutBridge("out", 1, uuid4(), "here", settings, options or {})


def record(n: int, subject: str, bridge: OutBridge) -> Record:
    """Return a record of the bridge with the clock `n`."""
    headers = {
        "ce_id": UUID(int=n),
        "mailroom-origin": bridge.node_id,
        "mailroom-link": bridge.link,
        "mailroom-clock": n,
    }
    given = tuple((name, str(value).encode()) for name, value in headers.items())
    return Record(subject, None, str(n).encode(), given, n, n, UUID(int=n), datetime.now(UTC))
