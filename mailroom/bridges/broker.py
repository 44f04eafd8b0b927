"""What Mailroom knows of a broker: a descriptor, which the broker's own folder or package declares as an entry point.

An entry point of the group `mailroom.brokers` has the broker's name, and names a `Broker`. So a broker is added without
a change here, and no other module asks which one it is: they ask the descriptor what it can do. A descriptor names its
clients as `module:Class`, so that a list of brokers imports no client library.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

from mailroom.bridges.record import Format, IsReserved, reserving
from mailroom.errors import ConfigurationError
from mailroom.packages.installed import declared, load, package_of, sole

log = logging.getLogger("mailroom.bridges")

# D-bridges-26: A broker is a plug-in, and so are the four of this repository.
GROUP = "mailroom.brokers"
# A class of a user's own, which has no descriptor: `module:Class`.
OWN_BROKER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z", re.ASCII)
# A broker and its settings are options of the command, so their names are in one form, which no two of them share.
NAME = re.compile(r"[a-z][a-z0-9-]*\Z", re.ASCII)
# A user and a password before the host. A broker's address is stored and shown.
USERINFO = re.compile(r"(^|/|,)[^/,@\s]*@")

Start: TypeAlias = Literal["earliest", "latest"]
Part: TypeAlias = Mapping[str, Any]
NO_BINDING: Part = {}


def address_text(address: str) -> None:
    """Check that `address` names one or several servers and holds no login, which would be stored and shown."""
    if not address or address != address.strip() or re.search(r"[\x00-\x20]", address):
        raise ConfigurationError("A broker's address is HOST:PORT, or several of them.", code="MR-bridge-settings")
    if USERINFO.search(address):
        raise ConfigurationError(
            "A broker's address is stored and shown, so it holds no user and no password: give these to the dispatcher "
            "by its environment (MAILROOM_BRIDGE_<NAME>_...).",
            code="MR-bridge-settings",
        )


def _anything(_text: str) -> None:
    """Accept any text."""


@dataclass(frozen=True, slots=True)
class OwnSetting:
    """A setting that only this broker has: it is stored with those of a bridge, and is an option of the command line.

    `name` is of small letters, digits and hyphens. `check` raises `ConfigurationError` for a text that it cannot be.
    An empty text is no setting.
    """

    name: str
    help: str
    metavar: str = "TEXT"
    check: Callable[[str], None] = _anything


@dataclass(frozen=True, slots=True)
class PublishesTo:
    """How a broker is published to: `client` is the `Publisher`, as `module:Class`.

    `order` is what keeps the order of the messages: the whole bridge, or each key. `exactly_once` says whether readers
    get each message once: `never`; as an `option` of the bridge, whose mark the broker keeps in its transactions; or
    `always`. `formats` are those that it has. Unless `is_asked`, opening the client asks the broker nothing.
    """

    client: str
    order: Literal["bridge", "key"]
    exactly_once: Literal["never", "option", "always"] = "never"
    formats: tuple[Format, ...] = get_args(Format)
    settings: tuple[OwnSetting, ...] = ()
    is_asked: bool = True


@dataclass(frozen=True, slots=True)
class TakesFrom:
    """How a broker is taken in from: `client` is the `RecordSource`, as `module:Class`.

    `order` is that of its records: of each partition of a log, or of a queue, which deletes what is taken. `topics` is
    what the broker calls them, and `starts` where a bridge can begin.
    """

    client: str
    order: Literal["partition", "queue"] = "partition"
    topics: str = "topics"
    starts: tuple[Start, ...] = get_args(Start)
    settings: tuple[OwnSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class ApiBinding:
    """How AsyncAPI describes a broker. By default its protocol has the broker's name, and there are no bindings.

    `protocol` is that of a server whose address says no scheme. `of_schemes` says that a scheme is the protocol where
    the address has one. `message` is the binding of a message whose record has a key. `channel_out` and `channel_in`
    make the binding of a channel of its address, the first one also of the settings that only this broker has.
    """

    protocol: str | None = None
    of_schemes: bool = False
    message: Part = field(default_factory=dict)
    channel_out: Callable[[str, Mapping[str, str]], Part] = lambda _address, _own: NO_BINDING
    channel_in: Callable[[str], Part] = lambda _address: NO_BINDING


@dataclass(frozen=True, slots=True)
class Broker:
    """What Mailroom knows of a broker.

    `name` is that of its entry point, and `title` the one in prose. `address` is the form of its address, `about` adds
    to that what the command line says of it, and `check_address` raises `ConfigurationError` for what it cannot be.
    Without `publishes` or `takes_from` it cannot do that; `otherwise` then says how else it is taken in from.

    `options` are the names that the environment may give its client, None if the client itself knows them. `library`
    is the module that its clients import, `install` the command that brings it, and `tested` says with which versions
    it was tested. A header whose name is one of `reserved`, or begins with one of `reserved_prefixes`, in whichever
    case, would tell the broker what to do, and so no message sets it. `commands` are subcommands of `mailroom bridge`
    that it brings, as `module:command`.
    """

    name: str
    title: str
    address: str
    about: str = ""
    publishes: PublishesTo | None = None
    takes_from: TakesFrom | None = None
    otherwise: str = ""
    check_address: Callable[[str], object] = address_text
    options: tuple[str, ...] | None = None
    library: str | None = None
    install: str = ""
    tested: str = ""
    # D-bridges-27: A broker reserves headers in its own records only.
    reserved: tuple[str, ...] = ()
    reserved_prefixes: tuple[str, ...] = ()
    asyncapi: ApiBinding = field(default_factory=ApiBinding)
    commands: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Its title, as a sentence begins with it."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def is_reserved(self) -> IsReserved:
        """Whether a header of a name is not the message's own, in a record at this broker."""
        return reserving(self.reserved, self.reserved_prefixes)

    @property
    def is_installed(self) -> bool:
        """Whether the library of its clients is there. It is not imported."""
        return self.library is None or find_spec(self.library) is not None

    @property
    def is_queue(self) -> bool:
        """Whether it deletes what is taken in."""
        return self.takes_from is not None and self.takes_from.order == "queue"


@cache
def broker_of(name: str) -> Broker:
    """Return the descriptor of a broker, or a plain one of a class that is named as `module:Class`.

    Raises `ConfigurationError` if no package has declared it, or if that package is broken.
    """
    if OWN_BROKER.match(name):
        return _plain(name)
    declaration = sole(declared(GROUP), name, "MR-bridge-no-client")
    if declaration is None:
        names = sorted({each.name for each in declared(GROUP)})
        known = f"give one of {', '.join(names)}" if names else "none is declared here"
        raise ConfigurationError(
            f"{name!r} is not a broker: {known}, or a class of your own as module:Class. If a package brings it, "
            "install that; if this is a checkout, install it again, since its brokers are entry points.",
            code="MR-bridge-settings",
        )
    try:
        found = load(declaration)
    except Exception as error:  # if one package is broken, the others stay usable
        why = f"{declaration.value} is not imported ({type(error).__name__}: {error})"
    else:
        if not (why := _wrong(found, name)):
            return found  # type: ignore[no-any-return]
        why = f"{declaration.value} {why}"
    raise ConfigurationError(f"The broker {name} cannot be used: {why}.", code="MR-bridge-no-client")


def _wrong(found: object, name: str) -> str:
    """Return what is wrong with a descriptor, empty if nothing is."""
    if not isinstance(found, Broker) or found.name != name:
        return "is no Broker of this name"
    for can in (found.publishes, found.takes_from):
        names = [each.name for each in can.settings] if can is not None else []
        if wrong := [each for each in (name, *names) if not NAME.match(each)]:
            return f"has the name {wrong[0]!r}, which is not of small letters, digits and hyphens"
        if len({*names}) < len(names):
            return "has two settings of one name"
    return ""


def bringing(name: str) -> str:
    """Return the name of the package that declares a broker."""
    declaration = sole(declared(GROUP), name, "MR-bridge-no-client")
    return name if declaration is None else package_of(declaration)


def described(name: str) -> Broker:
    """Return the descriptor of a broker, or a plain one if it is not installed here: other processes may have it."""
    try:
        return broker_of(name)
    except ConfigurationError:
        return _plain(name)


@cache
def brokers() -> tuple[Broker, ...]:
    """Return the descriptors of all brokers that are installed, by name. One that cannot be used is logged."""
    found = []
    for name in sorted({each.name for each in declared(GROUP)}):
        try:
            found.append(broker_of(name))
        except ConfigurationError as error:
            log.warning("%s", error)
    return tuple(found)


def _plain(name: str) -> Broker:
    return Broker(name, name, "ADDRESS", publishes=PublishesTo(name, "bridge", "option"), takes_from=TakesFrom(name))
