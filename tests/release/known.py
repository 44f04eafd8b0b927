"""What is in an environment: a bill of materials (CycloneDX), and the vulnerabilities that are known of it."""

import json
import subprocess
from pathlib import Path

from click import echo

from tests.release.trying import UV
from tests.wheel.environment import Environment

# By uv in environments of their own: what they need would decide about the versions that are tried here.
BILL = (*UV, "tool", "run", "--quiet", "--from", "cyclonedx-bom>=7,<8", "cyclonedx-py", "environment")
AUDIT = (*UV, "tool", "run", "--quiet", "pip-audit>=2.9,<3")


def bill(environment: Environment, into: Path) -> None:
    """Write the bill of materials of an environment."""
    into.parent.mkdir(parents=True, exist_ok=True)
    command = [*BILL, "--output-reproducible", "--output-format", "JSON", "--output-file", str(into)]
    subprocess.run([*command, str(environment.python)], check=True, timeout=600, capture_output=True)
    listed = [each["name"] for each in json.loads(into.read_text())["components"]]
    if "pg-mailroom" not in listed:
        raise SystemExit(f"{into.name} does not list the wheel itself")
    echo(f"{into.name}: {len(listed)} components")


def harmless(environment: Environment, directory: Path) -> bool:
    """Return whether nothing of the environment has a known vulnerability; where nobody can be asked, say so."""
    pinned = directory / "pinned.txt"
    freeze = [*UV, "pip", "freeze", "--quiet", "--exclude-editable", "--python", str(environment.python)]
    lines = subprocess.run(freeze, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    pinned.write_text("\n".join(line for line in lines if not line.startswith("pg-mailroom")))
    asked = subprocess.run(
        [*AUDIT, "--requirement", str(pinned), "--no-deps", "--disable-pip", "--format", "json"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return judged(asked.stdout, asked.stderr)


def judged(answer: str, error: str) -> bool:
    """Return whether an answer of pip-audit names no vulnerability, and print what it names."""
    try:
        dependencies = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        lines = error.strip().splitlines() or ["no answer"]
        echo(f"pip-audit: its database could not be asked, so nothing is known ({lines[-1][:200]})")
        return True
    bad = {each["name"]: [found["id"] for found in each.get("vulns", [])] for each in dependencies}
    for name, ids in bad.items():
        if ids:
            echo(f"pip-audit: {name}: {', '.join(ids)}")
    echo(f"pip-audit: {len(bad)} components looked up")
    return not any(bad.values())
