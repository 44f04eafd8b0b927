import collections
import random
import threading

from inbox.exceptions import Park, Skip
from inbox.worker.worker import Worker
from mailroom import create_inbox
from mailroom.registry.logs import create_log
from tests.support.node import Node


def test_worker(node: Node) -> None:
    node.connection.execute("CREATE TABLE ledger (n bigserial, inbox text, key text, clock bigint, id uuid)")
    with node.connection.transaction():
        create_log(node.connection, "orders", ["order.#"], lanes=8, actor="a")
        for name in ("billing", "search"):
            create_inbox(node.connection, name, log="orders", backoff_s=0.05, backoff_max_s=0.1)
    rng = random.Random(1)
    fails = collections.Counter()
    lock = threading.Lock()

    def handler(name):
        def handle(message, connection):
            with lock:
                seen = fails[name, message.id]
                if message.key in ("k1", "k2") and seen < 2 and message.clock % 3 == 0:
                    fails[name, message.id] += 1
                    raise ValueError("no")
                if message.key == "k5" and message.clock > 300 and message.clock % 20 == 5:
                    fails["park", name] += 1
                    raise Skip("no") if fails["park", name] == 1 else Park("no")
            connection.execute(
                "INSERT INTO ledger (inbox, key, clock, id) VALUES (%s,%s,%s,%s)",
                [name, message.key, message.clock, message.id],
            )

        return handle

    workers = [
        Worker(node.dsn, name, handler(name), parallel=3, batch=20, poll_interval_s=0.2)
        for name in ("billing", "search")
    ]
    threads = [threading.Thread(target=w.run, daemon=True) for w in workers]
    for t in threads:
        t.start()
    for batch in range(20):
        with node.connection.transaction():
            pass
        for n in range(30):
            node.send("order.paid", key=f"k{rng.randrange(9)}")
        node.deliver_all()
    import time

    end = time.monotonic() + 20
    while time.monotonic() < end:
        left = [node.value("SELECT count(*) FROM ledger WHERE inbox=%s", n) for n in ("billing", "search")]
        print(left, node.rows("SELECT inbox, key, clock, attempts, retry_at::text, parked_at FROM mailroom.key_state"))
        time.sleep(1)
        if [node.value("SELECT count(*) FROM ledger WHERE inbox=%s", n) for n in ("billing", "search")] == left:
            break
    for w in workers:
        w.stop()
    for t in threads:
        t.join(10)
    print(fails)
    for name in ("billing", "search"):
        rows = node.rows("SELECT key, clock FROM ledger WHERE inbox=%s ORDER BY n", name)
        parked = node.value("SELECT count(*) FROM mailroom.parked WHERE inbox=%s", name) + node.value(
            f"SELECT count(*) FROM mailroom.inbox_{name}"
        )
        dead = node.value("SELECT count(*) FROM mailroom.dead_letter WHERE inbox=%s", name)
        print(name, len(rows), parked, dead, node.value(f"SELECT count(*) FROM mailroom.receipts_{name}"))
        assert len(set(rows)) == len(rows)
        assert len(rows) + parked + dead == 600
        for k in {k for k, _ in rows}:
            clocks = [c for kk, c in rows if kk == k]
            assert clocks == sorted(clocks), (k, clocks)
