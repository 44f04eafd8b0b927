"""Clean virtual environments, and what is installed into them: never this checkout, nor anything of its environment."""

import os
import subprocess
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.installing import configured, uv_install

NAME = "pg-mailroom"
LIMIT_S = 300
# Of these variables none reaches a program that is run here.
OURS = ("MAILROOM", "PG", "PYTHON", "VIRTUAL_ENV", "DATABASE_URL", "COV")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a home, a working directory and variables for the programs that are run in it."""

    prefix: Path
    home: Path
    variables: Mapping[str, str]

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    def run(self, *command: str, **variables: str) -> str:
        """Run a command, which must succeed, and return what it printed."""
        ended = self.ended(*command, **variables)
        assert ended.returncode == 0, (
            f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )
        return ended.stdout

    def ended(self, *command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a command and return how it ended."""
        return subprocess.run(
            command, cwd=self.home, env=self.environment(variables), capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip

    def start(self, *command: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a command that runs until it is stopped."""
        return subprocess.Popen(
            command, cwd=self.home, env=self.environment(variables), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        path = os.pathsep.join([str(self.prefix / "bin"), others["PATH"]])
        return {**others, "PATH": path, "HOME": str(self.home), **self.variables, **variables}


def made(directory: Path, **variables: str) -> Environment:
    """Make an empty environment below `directory`."""
    venv.create(directory / "venv", symlinks=True)
    home = directory / "home"
    home.mkdir()
    return Environment(directory / "venv", home, variables)


def install(
    environment: Environment, wheel: Path, extra: str, constraints: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Install the wheel with an extra, with several between commas, or with none, and other distributions."""
    limits = environment.home.parent / "constraints.txt"
    limits.write_text("\n".join(constraints))
    variables = environment.environment({"HOME": str(Path.home())})  # where the settings and the cache are
    variables = {**variables, **configured()}
    arguments = ["--python", str(environment.python), "--find-links", str(wheel.parent), "--constraint", str(limits)]
    arguments += [f"{wheel}[{extra}]" if extra else str(wheel), *others]
    assert uv_install(arguments, variables), "uv has said why"


def lowest(wheel: Path, extra: str) -> list[str]:
    """Return the constraints that hold each direct dependency at the lowest version that the wheel allows."""
    return [f"{each.name}=={lower_bound(each)}" for each in requirements(wheel, extra)]


def requirements(wheel: Path, extra: str) -> list[Requirement]:
    """Return the direct dependencies of the wheel with an extra, or several, on this machine."""
    return [
        each
        for each in metadata(wheel).requires_dist or []
        if each.marker is None or any(each.marker.evaluate({"extra": name}) for name in extra.split(","))
    ]


def metadata(wheel: Path) -> Metadata:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name), validate=False)


def lower_bound(requirement: Requirement) -> Version:
    found = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
    assert found, f"{requirement} has no lower bound"
    return max(found)
