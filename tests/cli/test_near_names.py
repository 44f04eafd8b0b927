"""A command that refuses an unknown name asks whether a near one of that kind was meant."""

import psycopg
import pytest

from inbox import Inbox
from mailroom.errors import UnknownInbox
from tests.support.command import done, mailroom, untold
from tests.support.node import Node
from tests.support.roles import role


def test_unknown_name_is_refused_with_the_near_one_of_its_kind(node: Node) -> None:
    for command in (
        "inbox create shipping",
        "link allow south",
        "link add north",
        "bridge out hooks --webhook https://shop.example/hooks",
        "bridge in stock --kafka localhost:9092 --from stock",
        "periodic add nightly @daily report.due",
    ):
        done(*command.split(), dsn=node.dsn)
    wrong = {
        "shipping": ["inbox set shiping --rate 1", "inbox drop shiping", "parked list shiping", "inbox peek shiping",
                     "grant reaper me --inbox shiping --print"],
        "south": ["link cut souht", "link set souht --keep-s 0", "link remove souht", "link remove souht --reader",
                  "link moved souht"],
        "north": ["link exclude nort", "link set nort --service hq", "link resume nort", "link report nort",
                  "link remove nort --source"],
        "hooks": ["bridge cut hoks", "bridge set hoks --keep-s 0", "bridge show hoks", "bridge test hoks"],
        "stock": ["bridge resume stok", "bridge test stok"],
        "nightly": ["periodic pause nightl", "periodic next nightl"],
    }  # fmt: skip
    calls = [(each.split(), 1, f"Did you mean {name!r}?") for name, commands in wrong.items() for each in commands]
    assert untold(calls, node.dsn) == []
    for command in ("inbox drop billing", "link cut nort", "bridge cut souht", "periodic pause stock"):
        assert "Did you mean" not in mailroom(*command.split(), dsn=node.dsn).output, command
    noted = mailroom("inbox", "subscribe", "shipping", "a", "--origin", "nort", "--no-wait", dsn=node.dsn)
    assert "Did you mean 'north'?" in noted.stderr


def test_reaper_of_one_inbox_is_told_too(node: Node) -> None:
    node.inbox("shipping")
    with role(node.dsn, "GRANT USAGE ON SCHEMA mailroom TO {role}") as (_, dsn), psycopg.connect(dsn) as connection:
        with pytest.raises(UnknownInbox, match="Did you mean 'shipping'"):
            Inbox("shiping").reap(connection, "k")
        connection.execute("SELECT")  # the caller's transaction goes on
