"""What `mailroom bridge` has of each broker that is installed: its options and commands, and the list of them all."""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, TypeAlias, TypeVar

import click

from mailroom.bridges.broker import Broker, OwnSetting, broker_of, brokers
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, table
from mailroom.errors import ConfigurationError

log = logging.getLogger("mailroom.bridges")

Way: TypeAlias = Literal["out", "in"]
F = TypeVar("F", bound=Callable[..., Any])
ORDERS = {"bridge": "of the bridge", "key": "of each key", "partition": "of each partition", "queue": "of the queue"}
EXACTLY_ONCE = {"never": "at least once", "option": "exactly once on request", "always": "exactly once"}
VERBS: Mapping[Way, str] = {"out": "Publish to", "in": "Take in from"}
CLASSES: Mapping[Way, str] = {"out": "Publisher", "in": "RecordSource"}


def _settings(broker: Broker, way: Way) -> Sequence[OwnSetting] | None:
    """Return the settings that only this broker has, None if it cannot do that."""
    can = broker.publishes if way == "out" else broker.takes_from
    return None if can is None else can.settings


def _able(way: Way) -> list[Broker]:
    return [each for each in brokers() if _settings(each, way) is not None]


def in_transactions() -> str:
    """Return which brokers keep a mark in transactions."""
    return ", ".join(each.title for each in _able("out") if each.publishes and each.publishes.exactly_once == "option")


def called() -> str:
    """Return what brokers call their topics, if they call them something else."""
    named = [(each.title, each.takes_from.topics) for each in brokers() if each.takes_from is not None]
    return "".join(f"; at {title} {topics}" for title, topics in named if topics != "topics")


def _at(broker: str) -> str:
    """Return the name of the argument that an option of a broker has, which no other one has."""
    return f"at_{broker.replace('-', '_')}"


def _own(setting: str) -> str:
    return f"own_{setting.replace('-', '_')}"


def broker_options(way: Way) -> Callable[[F], F]:
    """Give a command an option for each broker that can do it, whose value is the address, and for their settings."""

    def decorate(command: F) -> F:
        command = click.option("--broker", "by_name", nargs=2, metavar="BROKER ADDRESS", help=_any_help(way))(command)
        command = own_options(way)(command)
        for broker in reversed(_able(way)):
            about = f"; {broker.about}" if broker.about else ""
            text = f"{VERBS[way]} {broker.title}{about}."
            command = click.option(f"--{broker.name}", _at(broker.name), metavar=broker.address, help=text)(command)
        return command

    return decorate


def own_options(*ways: Way) -> Callable[[F], F]:
    """Give a command an option for each setting that only some brokers have."""

    def decorate(command: F) -> F:
        for each in reversed(_all_own(ways).values()):
            command = click.option(f"--{each.name}", _own(each.name), metavar=each.metavar, help=each.help)(command)
        return command

    return decorate


def _all_own(ways: Sequence[Way]) -> dict[str, OwnSetting]:
    return {each.name: each for way in ways for broker in _able(way) for each in _settings(broker, way) or ()}


def _any_help(way: Way) -> str:
    return (
        f"{VERBS[way]} another broker: by its name, see mailroom bridge brokers; or by a class of your own that is a "
        f"{CLASSES[way]}, as MODULE:CLASS."
    )


def chosen(way: Way, by_name: tuple[str, str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return which broker was chosen, its address, the settings that only it has, and all else that is given."""
    names = [each.name for each in _able(way)]
    found = [(name, address) for name in names if (address := given.get(_at(name))) is not None]
    found += [] if by_name is None else [by_name]
    if len(found) != 1:
        options = ", ".join(f"--{name}" for name in names)
        raise ConfigurationError(f"Name one broker: {options}, or --broker.", code="MR-arguments-conflict")
    [(name, address)] = found
    at = {_at(each) for each in names}
    others = {option: value for option, value in given.items() if option not in at}
    return {"broker": name, "address": address} | settled((way,), others)


def settled(ways: Sequence[Way], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, in which `own` are those that only some brokers have."""
    options = {_own(each): each for each in sorted(_all_own(ways))}
    own = {options[name]: value for name, value in given.items() if name in options and value is not None}
    others = {name: value for name, value in given.items() if name not in options and value not in (None, ())}
    return others | ({"own": own} if own else {})


@click.command("brokers")
@pass_call
def list_brokers(call: Call) -> None:
    """Show the brokers that can be used here, what they can do, and with which versions that was tested.

    \b
    Examples:
      mailroom bridge brokers
      mailroom bridge brokers --json
    """
    if call.json:
        document([_as_document(each) for each in brokers()])
    else:
        table(("broker", "address", "out", "in", "client", "tested with"), map(_row, brokers()))


def _row(broker: Broker) -> tuple[object, ...]:
    to, of = broker.publishes, broker.takes_from
    return (
        broker.name,
        broker.address,
        "no" if to is None else f"order {ORDERS[to.order]}; {EXACTLY_ONCE[to.exactly_once]}",
        broker.otherwise or "no" if of is None else f"{of.topics}; order {ORDERS[of.order]}",
        "installed" if broker.is_installed else broker.install or "not installed",
        broker.tested,
    )


def _as_document(broker: Broker) -> dict[str, object]:
    to, of = broker.publishes, broker.takes_from
    return {
        "broker": broker.name,
        "title": broker.title,
        "address": broker.address,
        "out": None if to is None else {
            "order": to.order, "exactly_once": to.exactly_once, "formats": to.formats, "settings": _names(to.settings),
        },
        "in": None if of is None else {
            "order": of.order, "topics": of.topics, "starts": of.starts, "settings": _names(of.settings),
        },
        "options": broker.options,
        "is_installed": broker.is_installed,
        "install": broker.install,
        "tested": broker.tested,
    }  # fmt: skip


def _names(settings: Sequence[OwnSetting]) -> list[str]:
    return [each.name for each in settings]


def own_commands() -> list[click.Command]:
    """Return the commands that brokers bring. One that cannot be imported is logged, and the others stay usable."""
    found = []
    for broker in brokers():
        for place in broker.commands:
            module, _, name = place.partition(":")
            try:
                found.append(getattr(import_module(module), name))
            except Exception as error:
                log.warning("The command %s of %s is not imported: %s", place, broker.name, error)
    return found


def is_asked(name: str, way: Way) -> bool:
    """Return whether opening the client of a broker asks it anything."""
    to = broker_of(name).publishes
    return way == "in" or to is None or to.is_asked
