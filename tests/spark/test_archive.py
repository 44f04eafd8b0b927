"""What a stream acknowledges goes into the archive of an inbox that keeps it, if its transaction commits."""

from inbox import Archive, Inbox
from mailroom.sql.runner import run
from spark_jobs.read import offsets
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node


def test_what_a_stream_acknowledges_is_kept(node: Node, connect: Connect) -> None:
    node.inbox("shipping", keep_reaped_days=3)
    for nth, key in enumerate("aba"):
        node.send("shipping", nth, key=key)
    node.deliver_all()
    read = Inbox("shipping").peek(node.connection, limit=100)
    with connect() as session:
        assert run(session, offsets.reaping(SCHEMA, "shipping", 0, read[1].clock)) == read[1].clock
        session.rollback()
        assert Archive("shipping").find(node.connection) == []
        run(session, offsets.reaping(SCHEMA, "shipping", 0, read[1].clock))
        session.commit()
    found = Archive("shipping").find(node.connection)
    assert [each.message.value for each in found] == [0, 1]
