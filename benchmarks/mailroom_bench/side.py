"""The process of one checkout in `mailroom_bench.sides`: reads the names of parts and prints what it finds in each.

Whatever it imports of the product is that checkout's.
"""

import gc
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

import mailroom

from . import cost_side, live_side
from .node import Node, fresh_node

PARTS: dict[str, Callable[[Node, int], dict[str, float]]] = {**cost_side.PARTS, **live_side.PARTS}


def main() -> None:
    """Measure what the standard input names, part by part, until it ends."""
    setup = json.loads(sys.stdin.readline())
    imported = Path(mailroom.__file__).resolve().parents[1]
    if imported != Path(setup["product"]):
        sys.exit(f"{setup['product']} was to be measured, and {imported} was imported.")
    gc.collect()
    gc.freeze()  # or a full collection, which walks all that was imported, would fall on one of the parts by chance
    for line in sys.stdin:
        with fresh_node(setup["dsn"]) as node:
            click.echo(json.dumps(PARTS[json.loads(line)](node, setup["messages"])))  # which flushes it


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it drops its schema
    with suppress(KeyboardInterrupt):
        main()
