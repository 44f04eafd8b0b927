"""Spark's daemon, which forks a process of Python for each step of a query, with what they import there already.

Spark's own is to run PySpark from an archive, of which no bytecode is kept, and imports nothing before it forks: each
of the processes, one for each row of options that is refused, then takes 1.4 s of a processor, and 0.02 s from here.
"""

import gc
import os
import sys
from importlib import import_module


def prepare() -> None:
    """Import what the processes import, from the packages that are installed and not from the archives."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would not be there in what is forked
    sys.path[0] = ""  # as with `python -m`
    for archive in [path for path in sys.path if path.endswith(".zip")]:
        sys.path.remove(archive)
    # Each process would read their directories again: 0.1 s.
    for archive in [path for path in sys.path_importer_cache if path.endswith(".zip")]:
        del sys.path_importer_cache[archive]
    for module in (sys.argv[1], "pyarrow.compute", "pyspark_mailroom_inbox", "pyspark_mailroom_outbox"):
        import_module(module)
    gc.freeze()


if __name__ == "__main__":
    prepare()
    from pyspark.daemon import manager

    manager()
