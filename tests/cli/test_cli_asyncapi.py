"""`mailroom asyncapi` prints the document of the topics in modules and of a node's bridges."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mailroom.bridges.bridges import Bridges
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.cli.commands.asyncapi import asyncapi
from mailroom.cli.options import share
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.session.settings import DSN_VARIABLE, LIBPQ_VARIABLES
from tests.support.node import Node

share(asyncapi)

MODULE = """
from dataclasses import dataclass
from mailroom import Topic

@dataclass
class Order:
    number: int

PAID = ALSO = Topic("order.paid", Order)
COUNTS = Topic("counts", dict[str, int])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, where no test has imported one of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_empty.py").write_text("import json\n")
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    return name


def call(*arguments: str, dsn: str | None = None) -> Result:
    names: dict[str, str | None] = dict.fromkeys((DSN_VARIABLE, *LIBPQ_VARIABLES))
    return CliRunner().invoke(asyncapi, arguments, env=names | {DSN_VARIABLE: dsn})


def printed(*arguments: str, dsn: str | None = None) -> dict[str, Any]:
    result = call(*arguments, dsn=dsn)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_topics_of_a_module_without_a_database(module: str) -> None:
    found = printed(module, "--title", "Shop", "--version", "1.2")
    assert found["info"] == {"title": "Shop", "version": "1.2"}
    assert [*found["channels"]] == ["counts", "order.paid"]
    assert found["components"]["schemas"]["order.paid-v1.Order"]["required"] == ["number"]
    assert found["servers"] == {}


def test_bridges_of_the_node_that_is_named(node: Node, module: str) -> None:
    bridges = Bridges()
    with node.connection.transaction():
        bridges.out(node.connection, "orders", OutSettings("kafka", "k1:9092"), topics=["order.#"], actor="ada")
        bridges.into(node.connection, "stock", InSettings("kafka", "k2:9092", ("levels",)), actor="ada")
        name = node.value("SELECT name FROM mailroom.node")
    found = printed(module, dsn=node.dsn)
    assert {each["host"]: each["protocol"] for each in found["servers"].values()} == {
        "k1:9092": "kafka", "k2:9092": "kafka", name: "mailroom",
    }  # fmt: skip
    assert {*found["operations"]} == {"send.orders.order.paid", "send.orders.topic", "receive.stock.levels"}
    assert found["channels"]["counts"]["servers"] == [{"$ref": "#/servers/node"}]
    assert [*printed(dsn=node.dsn)["channels"]] == ["topic", "levels"]
    # Without it nothing is asked of the database, which may be unreachable.
    assert printed(module, "--no-database", dsn="host=127.0.0.1 port=1")["servers"] == {}


def test_with_json_it_is_one_line(module: str) -> None:
    assert len(call(module, "--json").stdout.splitlines()) == 1
    assert len(call(module).stdout.splitlines()) > 10


def test_modules_that_have_no_topic_or_are_no_modules(module: str) -> None:
    result = call(f"{module}_empty")
    assert json.loads(result.stdout)["channels"] == {}
    assert result.stderr == f"{module}_empty has no Topic of its own: name the module in which they are declared.\n"
    for name, kind, code, text in (
        ("nowhere", ConfigurationError, "MR-module-not-found", "There is no module 'nowhere'"),
        ("shop/topics.py", ConfigurationError, "MR-module-not-found", "give the name of the module, shop.topics"),
        ("inbox.worker", ConfigurationError, "MR-module-not-found", "inbox is a package of Mailroom's own"),
        (f"{module}_broken", MailroomError, "MR-module-import-failed", "ZeroDivisionError: division by zero"),
    ):
        error = call(name).exception
        assert isinstance(error, kind)
        assert error.code == code
        assert text in str(error)
