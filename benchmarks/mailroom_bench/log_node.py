"""A node whose inboxes read a log, or have the same messages by key."""

from collections.abc import Iterator
from contextlib import contextmanager

from mailroom import create_inbox, create_log, drop_inbox

from .measure import Setup
from .node import Node, fresh_node
from .workload import INBOX

LOG = "bench_log"
LANES = 64
AT_ONCE = 50  # inboxes created in a transaction


@contextmanager
def reading_node(setup: Setup, kind: str, inboxes: int = 1, lanes: int = LANES) -> Iterator[tuple[Node, list[str]]]:
    """Give a node with so many inboxes that get the topic `INBOX`; the first one has its name."""
    names = [INBOX, *(f"{INBOX}_{nth}" for nth in range(1, inboxes))]
    with fresh_node(setup.dsn) as node:
        with node.connect() as connection:
            if kind == "log":
                drop_inbox(connection, INBOX, actor="bench", schema=node.schema)
                create_log(connection, LOG, [INBOX], lanes=lanes, schema=node.schema)
        made = names if kind == "log" else names[1:]
        for group in (made[nth : nth + AT_ONCE] for nth in range(0, len(made), AT_ONCE)):
            with node.connect() as connection:
                if kind == "log":
                    create_inbox(connection, group, log=LOG, schema=node.schema)
                else:
                    create_inbox(connection, group, [INBOX], schema=node.schema)
        try:
            yield node, names
        finally:
            # Before the schema is dropped, which would take all their locks at once.
            for group in (names[nth : nth + AT_ONCE] for nth in range(0, len(names), AT_ONCE)):
                for name in group:
                    tables = ["inbox", *(("lanes", "receipts") if kind == "log" else ())]
                    node.execute(f"DROP TABLE {', '.join(f'{node.schema}.{table}_{name}' for table in tables)}")
