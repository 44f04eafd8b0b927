"""A real Prometheus that scrapes the processes of the soak and evaluates the alert rules of docs/operate/files."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.pages import FILES
from tests.support.port import free_port
from tests.support.waiting import eventually

RULES = FILES / "mailroom.rules.yml"
HASTE = 60  # an hour of a rule passes in a minute
DURATION = re.compile(r"(?<=[\[:])(\d+)([hm])(?=[\]:])")
UNITS = {"h": 3600, "m": 60, "s": 1}


class Prometheus:
    """What it says of the alerts."""

    def __init__(self, url: str) -> None:
        self._url = url

    def alerts(self) -> dict[str, str]:
        """Return the alerts whose condition is true, and their state, pending or firing."""
        active = [alert for rule in self._rules() for alert in rule["alerts"]]
        return {alert["labels"]["alertname"]: alert["state"] for alert in active}

    def broken_rules(self) -> dict[str, str]:
        """Return the rules that could not be evaluated, with the error."""
        return {rule["name"]: rule["lastError"] for rule in self._rules() if rule["health"] == "err"}

    def is_evaluating(self) -> bool:
        """Tell whether each rule was evaluated."""
        try:
            return all(rule["health"] == "ok" for rule in self._rules())
        except (urllib.error.URLError, ConnectionError):
            return False

    def down(self) -> set[str]:
        """Return the processes that did not answer their last scrape, and why."""
        targets = self._get("targets?state=active")["activeTargets"]
        return {f"{each['scrapeUrl']} {each['lastError']}" for each in targets if each["health"] != "up"}

    def _rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{what}", timeout=10) as answer:
            return json.load(answer)["data"]


def available() -> bool:
    """Tell whether this machine has it."""
    return shutil.which("prometheus") is not None


@contextmanager
def prometheus(home: Path, ports: Iterable[int], *, hasty: bool) -> Iterator[Prometheus]:
    """Run one that scrapes these ports.

    `hasty` shortens the time for which a condition has to hold, and the ranges that rules look back over: the
    conditions and their limits are those of the file.
    """
    rules = yaml.safe_load(RULES.read_text())
    if hasty:
        for group in rules["groups"]:
            hasten(group)
    each = "1s" if hasty else "5s"
    home.mkdir()
    (home / "rules.yml").write_text(yaml.safe_dump(rules))
    targets = [f"127.0.0.1:{port}" for port in ports]
    (home / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": each, "scrape_timeout": each, "evaluation_interval": each},
                "rule_files": ["rules.yml"],
                "scrape_configs": [{"job_name": "mailroom", "static_configs": [{"targets": targets}]}],
            }
        )
    )
    address = f"127.0.0.1:{free_port()}"
    with (home / "log").open("w") as log:
        started = subprocess.Popen(
            [
                "prometheus", f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        asked = Prometheus(f"http://{address}")
        eventually(lambda: started.poll() is not None or asked.is_evaluating())
        assert started.poll() is None, (home / "log").read_text()
        yield asked
    finally:
        started.terminate()
        started.wait()


def hasten(group: dict[str, Any]) -> None:
    """Shorten the durations of a group of rules."""
    group["interval"] = "1s"
    for rule in group["rules"]:
        if "for" in rule:
            rule["for"] = hastened(rule["for"])
        rule["expr"] = DURATION.sub(lambda found: hastened(found[0]), rule["expr"])


def hastened(duration: str) -> str:
    """Return a duration so much shorter, in whole seconds."""
    return f"{max(1, int(duration[:-1]) * UNITS[duration[-1]] // HASTE)}s"
