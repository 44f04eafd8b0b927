"""libpq's service file: what an entry says about a connection, so that our own defaults do not override it."""

import os
from collections.abc import Mapping
from pathlib import Path

NAME = "pg_service.conf"


def service_entry(service: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what libpq reads of this entry, or of PGSERVICE's if the name is empty.

    That is nothing if there is no such entry, which libpq says itself. Only the file of libpq's own installation is not
    known here: give PGSYSCONFDIR if an entry stands there.
    """
    name = service or environment.get("PGSERVICE")
    if not name:
        return {}
    for file in _files(environment):
        if (found := _entry(file, name)) is not None:
            return found
    return {}


def _files(environment: Mapping[str, str]) -> list[Path]:
    own = environment.get("PGSERVICEFILE")
    files = [Path(own) if own else Path("~").expanduser() / f".{NAME}"]
    if shared := environment.get("PGSYSCONFDIR"):
        files.append(Path(shared) / NAME)
    return files


def _entry(file: Path, name: str) -> dict[str, str] | None:
    try:
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: dict[str, str] | None = None
    for line in map(str.strip, lines):
        if line.startswith("["):
            if found is not None:
                break
            if line.startswith(f"[{name}]"):
                found = {}
        elif found is not None and not line.startswith("#") and "=" in line:
            key, _, value = line.partition("=")
            found.setdefault(key, value)  # as for libpq, the first one counts
    return found
