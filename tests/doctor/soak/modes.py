"""What handlers of the soak do to the messages that say so, as long as that is turned on: a file each."""

import os
from pathlib import Path

VARIABLE = "SOAK_MODES"  # in the environment of a worker: the directory of these files
HANG, FAIL = "hang", "fail"


def is_on(mode: str) -> bool:
    """Tell whether a mode is on in this worker."""
    return (Path(os.environ[VARIABLE]) / mode).exists()
