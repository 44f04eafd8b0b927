"""`.venv/bin/python tests/support/installing.py EXTRAS`: install this checkout into the environment of that Python.

By uv, which takes a tenth of pip's time, from the index that pip is configured for; by pip where uv cannot be had. What
was installed is kept in uv's cache: the same projects' files have the same again that day, without asking the index.

It runs before anything is installed, so it imports nothing but Python's own.
"""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECTS = (ROOT, ROOT / "benchmarks")
FRESH_S = 24 * 3600
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV = (sys.executable, "-m", "uv")
# What uv has for each of pip's settings.
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}


def uv_variables(configuration: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what makes uv install from where pip does, by what `pip config list` prints; what is set stays."""
    found: dict[str, str] = {}
    # pip takes its variables before what is said for `install`, and that before what is said for all commands.
    order = ("global", "install", ":env:")
    lines = [line.partition("=") for line in configuration.splitlines() if "=" in line]
    for section in order:
        for name, _, value in lines:
            known = name.removeprefix(f"{section}.")
            if known != name and known in NAMES:
                found[NAMES[known]] = _text(value)
    if "UV_FIND_LINKS" in found:
        places = [place for place in found["UV_FIND_LINKS"].split() if "://" in place or Path(place).is_dir()]
        found["UV_FIND_LINKS"] = ",".join(places)  # pip passes over those that are not there
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # the highest version of all indexes, as pip has it
    return {name: value for name, value in found.items() if value and name not in environment}


def _text(value: str) -> str:
    try:
        return " ".join(str(ast.literal_eval(value)).split())
    except (SyntaxError, ValueError):
        return value


def configured() -> dict[str, str]:
    """Return the variables for uv in this environment."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    return uv_variables(listed.stdout)


def uv_install(arguments: list[str], environment: Mapping[str, str], key: str = "") -> bool:
    """Run `uv pip install`, and tell whether that worked.

    Where this key, or anything of ours if there is none, was installed that day, the cache is tried first.
    """
    asked = subprocess.run([*UV, "cache", "dir"], capture_output=True, text=True, check=False, env=environment)
    if asked.returncode:
        return False
    marks = [Path(asked.stdout.strip(), name) for name in ("mailroom", f"mailroom-{key}")]
    mark = marks[bool(key)]
    install = [*UV, "--quiet", "pip", "install", *arguments]
    if mark.exists() and time.time() - mark.stat().st_mtime < FRESH_S:
        known = subprocess.run([*install, "--offline"], capture_output=True, check=False, env=environment)
        if not known.returncode:
            return True
    if subprocess.run(install, check=False, env=environment).returncode:
        return False
    for mark in marks:
        mark.touch()
    return True


def by_uv(targets: list[str], extras: str) -> bool:
    """Install into the environment of this Python by uv, and tell whether that worked."""
    if subprocess.run([*PIP, "install", "--quiet", "uv"], check=False).returncode:
        return False
    environment = {**os.environ, **configured()}
    return uv_install(["--python", sys.executable, *targets], environment, _key(extras, environment))


def _key(extras: str, environment: Mapping[str, str]) -> str:
    """Return a hash of what decides what is installed."""
    settings = sorted(f"{name}={value}" for name, value in environment.items() if name.startswith("UV_"))
    texts = [sys.version, extras, *settings, *((project / "pyproject.toml").read_text() for project in PROJECTS)]
    return sha256("\0".join(texts).encode()).hexdigest()[:32]


def main(extras: str) -> int:
    """Return the exit code."""
    ours, benchmarks = PROJECTS
    targets = ["--editable", f"{ours}[{extras}]", "--editable", str(benchmarks)]
    if by_uv(targets, extras):
        return 0
    print("uv cannot install this, so pip does: it takes minutes", file=sys.stderr)  # noqa: T201 - for who runs make
    return subprocess.run([*PIP, "install", "--quiet", *targets], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
