from inbox.inbox import Inbox
from mailroom import create_inbox
from mailroom.registry.logs import create_log
from tests.support.node import Node


def test_log(node: Node) -> None:
    with node.connection.transaction():
        create_log(node.connection, "orders", ["order.#"], lanes=4, actor="a")
        create_inbox(node.connection, "billing", log="orders")
        create_inbox(node.connection, "search", log="orders")
    for n in range(40):
        node.send("order.paid", key=f"k{n % 7}")
    print(node.deliver_all())
    for name in ("billing", "search"):
        inbox = Inbox(name)
        got = []
        for _ in range(20):
            with node.connection.transaction():
                print(inbox.backlog(node.connection), len(inbox.peek(node.connection)))
                taken = inbox.reap_any(node.connection, 3, 2)
                got += taken
                print([(m.key, m.clock) for m in taken])
        assert len(got) == 40
        for k in {m.key for m in got}:
            clocks = [m.clock for m in got if m.key == k]
            assert clocks == sorted(clocks)
