"""How a page is made of a template: always escaped, with the words and numbers of the commands."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dispatcher.dashboard.findings import linked, page_of, worded
from dispatcher.dashboard.forms import PACKED, packed
from mailroom.cli.acting import counted
from mailroom.cli.output import duration, shown, size
from mailroom.cli.screen import rate
from mailroom.doctor import kinds as findings
from mailroom.values.names import DEFAULT_SCHEMA

HERE = Path(__file__).parent
STATIC = HERE / "static"
KINDS = {"M": "message", "E": "event", "C": "command", "R": "reply"}


def time_of(at: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def ago(at: datetime | None, now: datetime) -> str:
    """Return how long ago or in how long a time is."""
    if at is None:
        return "-"
    seconds = (now - at).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def since(at: datetime | None, now: datetime) -> str:
    """Return for how long something has lasted. It may have begun after the figures of the page were read."""
    return ago(at and min(at, now), now)


def again(at: datetime, now: datetime) -> str:
    """Return when a failing key is tried again."""
    return f"again {ago(at, now)}" if at > now else "due"


def estimate(number: int | None) -> str:
    """Return an estimate, or that there is none."""
    return "?" if number is None else shown(number)


def unit(what: str, number: str) -> str:
    """Return a unit in the plural as it stands after this number: 1 message, 2 messages."""
    return (
        what[: -2 if what.endswith(("sses", "xes")) else -1]
        if number == "1" and what.endswith("s") and "/" not in what
        else what
    )


def option(schema: str) -> str:
    """Return what a command needs to find the node."""
    return "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"


def query(path: str, **fields: object) -> str:
    """Return one of our paths with a query; fields that are None are left out."""
    given = packed(fields)
    return f"{path}?{given}" if given else path


@cache
def digest(name: str) -> str:
    """Return what tells one version of a static file from another."""
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]


# D-dashboard-4: Without scripts the dashboard works.
def environment() -> Environment:
    """Return the templates, with what they use."""
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Any] = {
        "duration": duration,
        "shown": shown,
        "size": size,
        "rate": rate,
        "time": time_of,
        "ago": ago,
        "again": again,
        "since": since,
        "of": unit,
        "estimate": estimate,
        "linked": linked,
        "worded": worded,
    }
    found.filters.update(filters)
    found.globals.update(
        counted=counted,
        query=query,
        packed=packed,
        PACKED=PACKED,
        digest=digest,
        kinds=KINDS,
        kinds_of=findings.KINDS,
        page_of_finding=page_of,
        next_number=count().__next__,
    )
    return found
