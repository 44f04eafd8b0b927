"""What the dispatcher's environment says of a bridge: the client's options, and what is secret.

A variable MAILROOM_BRIDGE_<NAME>_<OPTION> is an option of the bridge. With MAILROOM_BRIDGE_<NAME>_FILE, options come
from the lines `option=value` of that file, too; a variable wins.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from mailroom.errors import ConfigurationError

PREFIX = "MAILROOM_BRIDGE_"


def variables(name: str) -> str:
    """Return how the variables of a bridge begin: in upper case, and _ for all but letters and digits of ASCII."""
    return f"{PREFIX}{re.sub(r'[^A-Z0-9]', '_', name.upper())}_"


def reading_options(name: str, names: Collection[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the options of the bridge `name`, by the rest of the variable in lower case.

    `names` are all bridges of the node: a variable belongs to the one with the longest name that fits. Raises
    `ConfigurationError` if the file cannot be read.
    """
    environment = os.environ if environment is None else environment
    own = variables(name)
    longer = [start for start in map(variables, names) if start.startswith(own) and start != own]
    found = {
        variable.removeprefix(own).lower(): value
        for variable, value in environment.items()
        if variable.startswith(own) and not any(variable.startswith(other) for other in longer)
    }
    path = found.pop("file", None)
    return found if path is None else _in_file(f"{own}FILE", Path(path)) | found


def _in_file(variable: str, path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"{variable} names a file that cannot be read: {type(error).__name__}.", code="MR-bridge-options"
        ) from None
    options = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        option, equals, value = text.partition("=")
        if not equals or not option.strip():
            raise ConfigurationError(
                f"Line {number} of the file that {variable} names is not option=value.", code="MR-bridge-options"
            )
        options[re.sub(r"[^a-z0-9]", "_", option.strip().lower())] = value.strip()
    return options
