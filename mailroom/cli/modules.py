"""Modules of a user's own, imported by a command that is given their names."""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from mailroom.errors import ConfigurationError, MailroomError
from mailroom.packages.installed import NAMES, warn_of_hidden


def imported(name: str) -> ModuleType:
    """Import the module of this name, from the current directory or from what is installed.

    Raises `ConfigurationError` if there is none or it is one of Mailroom's own, and `MailroomError` if it fails.
    """
    if (package := name.partition(".")[0]) in NAMES:
        raise ConfigurationError(
            f"{package} is a package of Mailroom's own: rename your module.", code="MR-module-not-found"
        )
    if name.endswith(".py"):
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(
            f"{name} is a file: give the name of the module, {module}.", code="MR-module-not-found"
        )
    # As `python -m` does, so that a service can be run from its own directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    warn_of_hidden()
    try:
        return importlib.import_module(name)
    except MailroomError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"There is no module {error.name!r}: run this in the directory that holds it, or install it.",
                code="MR-module-not-found",
            ) from None
        # The author needs the place of the error; a full traceback would be mostly our own frames.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise MailroomError(
            f"{name} cannot be imported: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})",
            code="MR-module-import-failed",
        ) from error
