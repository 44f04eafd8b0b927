"""What `mailroom bridge` has of each broker that is installed: its options and commands, and the list of them all."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, TypeAlias, TypeVar

import click

from mailroom.bridges.broker import Broker, OwnSetting, bringing, broker_of, brokers
from mailroom.cli.call import Call, pass_call
from mailroom.cli.options import SHARED
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


def _clashes(way: Way, own: Collection[click.Parameter]) -> dict[str, str]:
    """Return which brokers a command cannot offer, and why: an option of theirs would mean two things.

    `own` are the command's parameters. A setting that several brokers have is one option, since only one of them is
    chosen. But an option is no address of one broker and setting of another, and none of the command's own.
    """
    command = {name for each in (*own, *SHARED) if not _is_of_broker(each) for name in each.opts} | {"--broker"}
    users = defaultdict[str, list[tuple[str, str]]](list)
    for broker in _able(way):
        users[f"--{broker.name}"].append((broker.name, "address"))
        for each in _settings(broker, way) or ():
            users[f"--{each.name}"].append((broker.name, "setting"))
    clashes: dict[str, str] = {}
    for option, uses in users.items():
        meant = [f"the {what} of {name} (package {bringing(name)})" for name, what in uses]
        if option in command:
            meant.append("the command itself (package pg-mailroom)")
        elif len({what for _, what in uses}) == 1:
            continue
        for name, _ in uses:
            clashes[name] = (
                f"The broker {name} cannot be used in this command: {option} is of {' and of '.join(meant)}."
            )
    return clashes


def _is_of_broker(parameter: click.Parameter) -> bool:
    return (parameter.name or "").startswith(("at_", "own_"))


def broker_options(way: Way) -> Callable[[F], F]:
    """Give a command an option for each broker that can do it, whose value is the address, and for their settings.

    It is applied after the command's own options, with which no broker's may clash.
    """

    def decorate(command: F) -> F:
        clashes = _clashes(way, getattr(command, "__click_params__", ()))
        for text in clashes.values():
            log.warning("%s", text)
        command = click.option("--broker", "by_name", nargs=2, metavar="BROKER ADDRESS", help=_any_help(way))(command)
        command = own_options(way)(command)
        for broker in reversed(_able(way)):
            if broker.name in clashes:
                continue
            about = f"; {broker.about}" if broker.about else ""
            text = f"{VERBS[way]} {broker.title}{about}."
            command = click.option(f"--{broker.name}", _at(broker.name), metavar=broker.address, help=text)(command)
        return command

    return decorate


def own_options(*ways: Way) -> Callable[[F], F]:
    """Give a command an option for each setting that only some brokers have, after the command's own options."""

    def decorate(command: F) -> F:
        settings = defaultdict[str, dict[str, tuple[Broker, OwnSetting]]](dict)
        own = getattr(command, "__click_params__", ())
        for way in ways:
            clashes = _clashes(way, own)
            for broker in _able(way):
                for each in () if broker.name in clashes else _settings(broker, way) or ():
                    settings[each.name].setdefault(broker.name, (broker, each))
        for name, uses in reversed(settings.items()):
            command = _setting_option(name, list(uses.values()))(command)
        return command

    return decorate


def _setting_option(name: str, uses: Sequence[tuple[Broker, OwnSetting]]) -> Callable[[F], F]:
    """Return the option of a setting. If several brokers have it, its help says what it is at each."""
    texts = [each.help if len(uses) == 1 else f"{broker.sentence}: {each.help}" for broker, each in uses]
    metavars = {each.metavar for _, each in uses}
    metavar = metavars.pop() if len(metavars) == 1 else "TEXT"
    return click.option(f"--{name}", _own(name), metavar=metavar, help=" ".join(texts))


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
    if why := _clashes(way, click.get_current_context().command.params).get(name):
        raise ConfigurationError(why, code="MR-bridge-no-client")
    at = {_at(each) for each in names}
    others = {option: value for option, value in given.items() if option not in at}
    return {"broker": name, "address": address} | settled((way,), others)


def settled(ways: Sequence[Way], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, in which `own` are those that only some brokers have."""
    names = {each.name for way in ways for broker in _able(way) for each in _settings(broker, way) or ()}
    options = {_own(each): each for each in sorted(names)}
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


def own_commands(taken: Collection[str]) -> list[click.Command]:
    """Return the commands that brokers bring. One that cannot be used is logged, and the others stay usable.

    `taken` are the names of other commands. A name that brokers of two packages have is of none of them.
    """
    found = defaultdict[str, list[tuple[str, click.Command]]](list)
    for broker in brokers():
        for place in broker.commands:
            module, _, name = place.partition(":")
            try:
                command: click.Command = getattr(import_module(module), name)
                found[str(command.name)].append((bringing(broker.name), command))
            except Exception as error:
                log.warning("The command %s of %s is not imported: %s", place, broker.name, error)
    for name, uses in found.items():
        packages = [*(["pg-mailroom"] if name in taken else []), *(package for package, _ in uses)]
        if len(packages) > 1:
            names = " and ".join(packages)
            log.warning("The packages %s have each a command mailroom bridge %s: a broker's is left out.", names, name)
    return [uses[0][1] for name, uses in found.items() if len(uses) == 1 and name not in taken]


def is_asked(name: str, way: Way) -> bool:
    """Return whether opening the client of a broker asks it anything."""
    to = broker_of(name).publishes
    return way == "in" or to is None or to.is_asked
