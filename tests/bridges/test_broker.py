"""Brokers are plug-ins: a folder or a package declares one, and nothing else knows its name."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dispatcher.cli.brokers import broker_options, chosen, own_commands
from mailroom.bridges.broker import Broker, broker_of, brokers, described
from mailroom.bridges.record import Form
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.errors import ConfigurationError
from tests.bridges.plugged import ROOT, forget, plugged
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import Node
from tests.support.source import parsed

PACKAGES = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs")
NAMES = ("kafka", "nats", "rabbit", "webhook")
# Where a broker may be named: its folders, what is one catalogue by design, and what lists public names.
FOLDERS = (
    *(f"dispatcher/bridges/{name}/" for name in ("kafka", "nats", "rabbitmq", "webhook")),
    "outbox/webhooks/",  # the server that takes webhooks in
)
EXCEPTIONS = {"mailroom/errors/codes.py": "the catalogue of codes", "outbox/__init__.py": "the public `WebhookApp`"}


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield what a module names, imports, and has as text, without docstrings and comments."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in prose:
                yield text
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
                yield text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield text
            case ast.ImportFrom(module=str(text)):
                yield text


@pytest.mark.slow
def test_no_module_names_a_broker_outside_of_its_folder() -> None:
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert {each.name for each in brokers()} == {"kafka", "nats", "rabbitmq", "webhook"}
    named = {
        (place, text)
        for path, tree in parsed(files)
        if not (place := str(path.relative_to(ROOT))).startswith(FOLDERS) and place not in EXCEPTIONS
        for text in texts(tree)
        if any(name in text.casefold() for name in NAMES)
    }
    assert named == set()


LISTED = """
import sys
from dispatcher.cli.bridge import bridge
from mailroom.bridges.broker import brokers
assert len(brokers()) == 4 and all(each.is_installed for each in brokers())
print(sorted({"confluent_kafka", "nats", "aio_pika", "aiormq", "httpcore", "uvicorn"} & {*sys.modules}))
"""


@pytest.mark.slow
def test_listing_brokers_imports_no_client() -> None:
    ran = subprocess.run([sys.executable, "-c", LISTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


TAPE = """
from dispatcher.cli.brokers import broker_options, chosen, own_commands
from mailroom.bridges.broker import Broker, OwnSetting, PublishesTo
TAPE = Broker("tape", "Tape", "FOLDER", publishes=PublishesTo(
    "tape_broker:Missing", "bridge", settings=(OwnSetting("reel", "The reel."),)),
    reserved=("rewind",), install="glue it")
"""


@pytest.fixture
def tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """Install a package with the broker `tape`, and with two that are broken."""
    declared_there = "tape = tape_broker:TAPE\nbroken = broken_broker:IT\nother = tape_broker:TAPE\n"
    (tmp_path / "broken_broker.py").write_text("raise ValueError('broken')")
    with plugged(tmp_path, monkeypatch, "tape_broker", TAPE, declared_there):
        yield broker_of("tape")


def test_broker_of_another_package_is_as_ours_and_a_broken_one_harms_nobody(
    node: Node, tape: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [each.name for each in brokers()] == ["kafka", "nats", "rabbitmq", "tape", "webhook"]
    assert (tape.is_reserved("Rewind"), broker_of("kafka").is_reserved("rewind")) == (True, False)
    for name, why in (("broken", "broken_broker:IT is not imported"), ("other", "is no Broker of this name")):
        with pytest.raises(ConfigurationError, match=why):
            broker_of(name)
    OutSettings("tape", "reels", own={"reel": "7"})
    for own in ({"spool": "7"}, {"reel": 7}):
        with pytest.raises(ConfigurationError, match="setting"):
            OutSettings("tape", "reels", own=own)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="Tape cannot be taken in from"):
        InSettings("tape", "reels", ("a",))
    with pytest.raises(ConfigurationError, match="Tape is at least once"):
        OutSettings("tape", "reels", Form("a"), exactly_once=True, mark_topic="a")

    done("bridge", "out", "played", "--broker", "tape", "reels", dsn=node.dsn)
    assert "Run: glue it" in error_of(mailroom("bridge", "test", "played", dsn=node.dsn))
    # Where its package is not installed the node is still shown.
    monkeypatch.setattr("mailroom.bridges.broker.declared", lambda _group: ())
    forget()
    [state] = json_of("bridge", "status", dsn=node.dsn)["out"]
    assert (state["settings"]["broker"], described("tape").reserved) == ("tape", ())
    assert "'tape' is not a broker" in error_of(mailroom("bridge", "test", "played", dsn=node.dsn))


CLASHING = """
import click
from mailroom.bridges.broker import Broker, OwnSetting, PublishesTo
def of(name, *settings, commands=()):
    own = tuple(OwnSetting(each, f"The {each} of {name}.") for each in settings)
    return Broker(name, name, "FOLDER", publishes=PublishesTo("x:Y", "bridge", settings=own), commands=commands)
KAFKA, TOPIC, JSON = of("kafka"), of("topic"), of("jay", "json")
REEL, DISC, TWICE, LOUD = of("reel", "speed"), of("disc", "speed", "side"), of("twice", "a", "a"), of("loud", "A b")
SIDE = of("side", commands=("clashing:PLAY", "clashing:OUT"))
PLAY, OUT = click.Command("play"), click.Command("out")
"""
CLASHES = "jay = clashing:JSON\n" + "".join(
    f"{name} = clashing:{name.upper()}\n" for name in ("kafka", "topic", "reel", "disc", "twice", "loud", "side")
)


def test_names_that_mean_two_things_are_errors_that_name_the_packages_and_other_brokers_stay_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out(by_name: tuple[str, str] | None, **given: str | None) -> dict[str, object]:
        return chosen("out", by_name, given)

    with plugged(tmp_path, monkeypatch, "clashing", CLASHING, CLASHES):
        assert {each.name for each in brokers()} == {
            *("nats", "rabbitmq", "webhook"), *("topic", "jay", "reel", "disc", "side"),
        }  # fmt: skip
        for name, why in (("kafka", r"clashing \(.*pg-mailroom \("), ("twice", "two settings"), ("loud", "'A b'")):
            with pytest.raises(ConfigurationError, match=why):
                broker_of(name)
        command = click.command("out")(
            broker_options("out")(click.option("--topic")(lambda topic, **given: out(**given)))
        )
        for name, option, packages in (
            ("topic", "--topic", "package clashing.*package pg-mailroom"),
            ("jay", "--json", "package clashing.*package pg-mailroom"),
            ("disc", "--side", "disc .package clashing.*side .package clashing"),
            ("side", "--side", "disc .package clashing.*side .package clashing"),
        ):
            with pytest.raises(ConfigurationError, match=f"{option} is of .*{packages}"):
                command.main(["--broker", name, "x"], standalone_mode=False)
        options = {
            option: each.help for each in command.params if isinstance(each, click.Option) for option in each.opts
        }
        assert {"--nats", "--reel", "--speed"} <= {*options}
        assert {"--disc", "--side", "--json"}.isdisjoint(options)
        made = command.main(["--reel", "x", "--speed", "3"], standalone_mode=False)
        assert made == {"broker": "reel", "address": "x", "own": {"speed": "3"}}
        caplog.clear()
        assert "play" in {each.name for each in own_commands({"out"})}
        assert "pg-mailroom and clashing have each a command mailroom bridge out" in caplog.text


def test_setting_that_two_brokers_have_is_one_option_that_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clashing = CLASHING.replace(', "side"', "")
    with plugged(tmp_path, monkeypatch, "clashing", clashing, "reel = clashing:REEL\ndisc = clashing:DISC\n"):
        command = click.command()(broker_options("out")(lambda **_: None))
        [speed] = [each.help for each in command.params if isinstance(each, click.Option) and "--speed" in each.opts]
        assert speed == "Disc: The speed of disc. Reel: The speed of reel."


def test_brokers_are_listed_with_what_they_can_do() -> None:
    found = {each["broker"]: each for each in json_of("bridge", "brokers", dsn="")}
    assert {name: (each["out"] or {}).get("exactly_once") for name, each in found.items()} == {
        "kafka": "option", "nats": "always", "rabbitmq": "never", "webhook": "never",
    }  # fmt: skip
    assert (found["webhook"]["in"], found["rabbitmq"]["in"]["order"]) == (None, "queue")
    assert "RabbitMQ 3.10" in done("bridge", "brokers", dsn="")
