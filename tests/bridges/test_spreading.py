"""A repeat goes to the partition of the first try: only there do readers tell it by its clock."""

import ctypes
import random
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from confluent_kafka import cimpl

from dispatcher.bridges.kafka.partition import PARTITIONERS, partitioner
from mailroom.bridges.parts import spreading
from mailroom.bridges.record import Form, record_of
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from outbox import Outbox
from tests.bridges.messages import SENDER, message
from tests.bridges.tended import bridge_out, out_state, tended
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually_async

PARTS = "SELECT after, parts FROM mailroom.bridge_parts ORDER BY after"

pytestmark = pytest.mark.usefixtures("quick")


def send(node: Node, count: int) -> None:
    with node.connection.transaction():
        for n in range(count):
            Outbox().send(node.connection, "order.paid", n)
    node.deliver_all()


async def test_partitions_that_are_added_are_for_what_nobody_can_have_handed_over(node: Node) -> None:
    log = bridge_out(node)
    log.partitions, log.held = 2, True
    send(node, 3)
    async with tended(node):
        await eventually_async(lambda: len(log.records) == 3)  # and none is acknowledged
    log.partitions, log.held = 5, False
    send(node, 2)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 5)
        assert [record.parts for record in log.records] == [2] * 8
        assert node.rows(PARTS) == [(0, 2), (5, 5)]
        send(node, 1)
        await eventually_async(lambda: out_state(node).acked == 6)
        assert log.records[-1].parts == 5
    log.partitions = 6
    send(node, 1)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 7)
    assert node.rows(PARTS) == [(5, 5), (7, 6)]  # what held for acknowledged rows is forgotten
    log.partitions = 3  # another topic has the name, and nothing of this link
    send(node, 1)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 8)
    assert (log.records[-1].parts, node.rows(PARTS)) == (3, [(0, 3)])


async def test_run_that_was_overtaken_decides_nothing(node: Node) -> None:
    bridge_out(node)
    link = node.value("SELECT number FROM mailroom.link")
    with node.connection.transaction():
        assert not run(node.connection, spreading(SCHEMA, link, uuid4(), "log", 3, is_anew=True))
    assert node.rows(PARTS) == []


@pytest.mark.parametrize("name", PARTITIONERS)
def test_key_has_the_partition_that_other_clients_give_it(name: str) -> None:
    theirs = getattr(ctypes.CDLL(cimpl.__file__), f"rd_kafka_msg_partitioner_{name}")
    ours, dice = partitioner("out", name), random.Random(name)
    for size in range(1, 50):
        key, parts = dice.randbytes(size), dice.randint(1, 40)
        given = ctypes.c_void_p(), key, ctypes.c_size_t(size), ctypes.c_int32(parts)
        record = replace(record_of(message(), Form("t"), SENDER), key=key, parts=parts)
        assert ours(record) == theirs(*given, None, None)


def test_message_without_a_key_has_the_partition_of_its_id() -> None:
    choose = partitioner("out", "murmur2_random")
    records = [
        record_of(message(key=str(id), message_id=id), Form("t"), SENDER)
        for id in map(UUID, map("{:032x}".format, range(99)))
    ]
    assert {record.key for record in records} == {None}
    chosen = [[choose(replace(record, parts=7)) for record in records] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert set(chosen[0]) == set(range(7))
    with pytest.raises(ConfigurationError, match="a repeat has to go where the first try went"):
        partitioner("out", "random")
