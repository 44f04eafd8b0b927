"""Try the wheel on each Python and with the lowest and the newest dependencies, as uv resolves them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
from click import echo
from packaging.requirements import Requirement
from psycopg import sql

from mailroom.embedded import Server
from tests.wheel.environment import Environment, requirements
from tests.wheel.reader import PAGES, follow, follow_page

# Of the environment that this runs in.
UV = (sys.executable, "-m", "uv")
RESOLUTIONS = ("lowest-direct", "highest")


def everywhere(wheel: Path, minors: Sequence[str], directory: Path) -> list[Environment]:
    """Follow README and pages on each Python that is found. Return the environments that all of it ran in."""
    done = []
    with Server(directory / "server", settings={"fsync": "off"}) as server:
        for minor in minors:
            python = found(minor)
            if python is None:
                echo(f"Python {minor} was not found, and uv could not fetch it: not tried")
                continue
            for resolution in RESOLUTIONS:
                environment = made(directory / f"{minor}-{resolution}", python)
                install(environment, wheel, resolution)
                with database(server) as dsn:
                    follow(at(environment, "README"), dsn)
                for page in PAGES:
                    with database(server) as dsn:
                        follow_page(at(environment, page), page, dsn)
                echo(f"Python {minor}, {resolution}: the README's program and {len(PAGES)} pages ran")
                done.append(environment)
    return done


def found(minor: str) -> str | None:
    """Return the path of a Python 3.N that runs, fetched if it has to be and can be."""
    homes = sorted((Path.home() / ".pyenv" / "versions").glob(f"{minor}.*/bin/python"))
    for python in (shutil.which(f"python{minor}"), *map(str, homes)):
        if python is not None and told(python).startswith(f"Python {minor}."):
            return python
    uv = (*UV, "--quiet", "python")
    subprocess.run([*uv, "install", minor], capture_output=True, timeout=600, check=False)
    fetched = subprocess.run(
        [*uv, "find", "--managed-python", minor], capture_output=True, text=True, timeout=60, check=False
    )
    return fetched.stdout.strip() or None


def told(python: str) -> str:
    return subprocess.run([python, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout


def made(directory: Path, python: str) -> Environment:
    """Make an empty environment."""
    subprocess.run([*UV, "venv", "--quiet", "--python", python, str(directory / "venv")], check=True)
    (directory / "home").mkdir()
    return Environment(directory / "venv", directory / "home", {})


def at(environment: Environment, name: str) -> Environment:
    """Return the environment with a home of its own: pages save files of the same names."""
    home = environment.home / name
    home.mkdir()
    return Environment(environment.prefix, home, environment.variables)


def install(environment: Environment, wheel: Path, resolution: str) -> None:
    """Install the wheel. Its requirements are given too, so that the lowest of them are meant; so are frameworks."""
    own = [f"{each.name}{extras(each)}{each.specifier}" for each in requirements(wheel, "django")]
    frameworks = {"pytest", *(each for needed in PAGES.values() for each in needed)}
    others = [str(each.name) + str(each.specifier) for each in requirements(wheel, "dev") if each.name in frameworks]
    command = [*UV, "pip", "install", "--quiet", "--python", str(environment.python), "--resolution", resolution]
    subprocess.run([*command, str(wheel), *own, *others], check=True, timeout=600)


def extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


@contextmanager
def database(server: Server) -> Iterator[str]:
    """Give the URL of an empty database that is dropped afterwards."""
    name = f"page_{os.urandom(6).hex()}"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield server.dsn(name)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
