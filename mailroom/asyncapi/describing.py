"""The document: what typed topics and bridges are in AsyncAPI. Pure: no database, and no broker."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from mailroom.asyncapi import headers
from mailroom.asyncapi.schemas import PLACE, name_of, schemas_of
from mailroom.bridges.arrival import Decoding
from mailroom.bridges.broker import NO_BINDING, Broker, described
from mailroom.bridges.broker import Part as Binding
from mailroom.bridges.record import CONTENT_TYPES, fill
from mailroom.bridges.states import BridgeStates, InState, OutState
from mailroom.errors import ConfigurationError
from mailroom.message.topic import SCHEMA, Topic
from mailroom.values.names import MANY, ONE, fits

SPECIFICATION = "3.0.0"
NODE = "node"
_OF_A_CHANNEL = ("servers", "bindings")
DECODED: Mapping[Decoding, str] = {
    "json": "application/json",
    "cbor": "application/cbor",
    "bytes": "application/octet-stream",
    "text": "text/plain",
}

Part = dict[str, Any]


def document(
    topics: Iterable[Topic[Any, Any]],
    bridges: BridgeStates | None = None,
    *,
    node: str | None = None,
    title: str = "Mailroom",
    version: str = "0.0.0",
) -> dict[str, Any]:
    """Return an AsyncAPI 3.0 document, for `json.dumps`, of typed topics and of a node's bridges.

    `topics` are those whose values it describes, by JSON schemas. `bridges`, as `Bridges.status` returns them, give the
    servers, the channels there and the operations: a bridge out sends, one into the node receives; a cut one is left
    out. A topic that no bridge has is a channel too: with `node`, the node's name, at a server `node`, which is its
    database. `title` and `version` are those of the document. It holds no secret: settings of bridges have none.

    Raises `ConfigurationError` if two topics have one name and version, and different schemas.
    """
    made = _Document(list({id(each): each for each in topics}.values()))
    if bridges is not None:
        for out in bridges.out:
            if out.state != "cut":
                made.add_out(out)
        for into in bridges.into:
            made.add_in(into)
    made.add_others(node)
    return {
        "asyncapi": SPECIFICATION,
        "info": {"title": title, "version": version},
        "servers": made.servers,
        "channels": made.channels,
        "operations": made.operations,
        "components": {"schemas": made.schemas},
    }


@dataclass(slots=True)
class _Document:
    topics: list[Topic[Any, Any]]
    servers: dict[str, Part] = field(default_factory=dict)
    channels: dict[str, Part] = field(default_factory=dict)
    operations: dict[str, Part] = field(default_factory=dict)
    schemas: dict[str, Part] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.topics.sort(key=lambda each: (each.name, each.version))
        known: dict[str, Topic[Any, Any]] = {}
        for topic in self.topics:
            found = schemas_of(topic)
            if any(self.schemas.get(name, schema) != schema for name, schema in found.items()):
                raise ConfigurationError(
                    f"There are two topics {topic.name} of version {topic.version}, whose values differ: declare it "
                    "once, or count its versions.",
                    code="MR-registered-twice",
                )
            self.schemas |= found
            known[name_of(topic)] = topic
        self.topics = list(known.values())

    def add_out(self, bridge: OutState) -> None:
        """Add what a bridge publishes."""
        settings, form = bridge.settings, bridge.settings.form
        broker = described(settings.broker)
        name, topic_in = f"out.{bridge.name}", headers.TOPIC_IN[form.format]
        of_all = self._headers(name, headers.published(form))
        like = _Like(broker.asyncapi.message, CONTENT_TYPES[form.encode].decode(), of_all)
        typed = self._typed(bridge.topics)
        known = sorted({topic.name for topic in typed})
        channels: dict[str, dict[str, Part]] = {}
        for topic in typed:
            messages = channels.setdefault(fill(form.topic, topic.name), {})
            messages[f"{name}.{name_of(topic)}"] = like.typed(topic, {topic_in: {"const": topic.name}})
        patterns: dict[str, list[str]] = {}  # by address, of the messages whose type is not known
        for pattern in sorted({*bridge.topics} - {*known}):
            patterns.setdefault(form.topic if _is_pattern(pattern) else fill(form.topic, pattern), []).append(pattern)
        for address in patterns:
            channels.setdefault(address, {})[name] = like.untyped({topic_in: _others(patterns[address], known)})
        servers = self._servers(broker, settings.address)
        for address, messages in channels.items():
            bound = broker.asyncapi.channel_out(address, settings.own)
            channel = self._channel(servers, address, messages, bound)
            if "{topic}" in address:
                about = f"The topic of a message: {', '.join(patterns[address])}"
                self.channels[channel]["parameters"] = {"topic": {"description": about}}
            self._operate("send", bridge.name, channel, messages, _sent(bridge))
        self.reached |= {*known}

    def add_in(self, bridge: InState) -> None:
        """Add what a bridge takes in."""
        settings, intake = bridge.settings, bridge.settings.intake
        name = f"in.{bridge.name}"
        broker = described(settings.broker)
        bound = broker.asyncapi.message if intake.key == "record" else NO_BINDING
        like = _Like(bound, DECODED.get(intake.decode), self._headers(name, headers.read(intake.key)))
        servers = self._servers(broker, settings.address)
        for address in settings.topics:
            typed = self._typed(bridge.topics)
            if intake.as_topic is not None:
                typed = [topic for topic in typed if topic.name == fill(intake.as_topic, address)]
            messages = {f"{name}.{name_of(topic)}": like.typed(topic, {}) for topic in typed}
            messages = messages or {name: like.untyped({})}
            channel = self._channel(servers, address, messages, broker.asyncapi.channel_in(address))
            often = "once per id" if broker.is_queue else "exactly once"
            self._operate("receive", bridge.name, channel, messages, f"Taken in by bridge {bridge.name}, {often}.")
            self.reached |= {topic.name for topic in typed}

    def add_others(self, node: str | None) -> None:
        """Add the topics that no bridge has."""
        others = [topic for topic in self.topics if topic.name not in self.reached]
        if others and node is not None:
            about = "The node's database: messages that are sent and reaped there."
            self.servers[NODE] = {"host": node, "protocol": "mailroom", "description": about}
        for topic in others:
            self._channel([] if node is None else [NODE], topic.name, {name_of(topic): _Like().typed(topic, {})})

    def _typed(self, patterns: Iterable[str]) -> list[Topic[Any, Any]]:
        words = [pattern.split(".") for pattern in patterns]
        return [topic for topic in self.topics if any(fits(each, topic.name.split(".")) for each in words)]

    def _headers(self, name: str, schema: Part) -> Part:
        """Add the headers of a bridge; return a reference to them. No topic begins with an underscore."""
        self.schemas[f"_{name}.headers"] = schema
        return {"$ref": f"{PLACE}_{name}.headers"}

    def _operate(self, action: str, bridge: str, channel: str, messages: Iterable[str], about: str) -> None:
        at = _pointer("channels", channel)
        self.operations[f"{action}.{bridge}.{channel}"] = {
            "action": action,
            "channel": {"$ref": at},
            "summary": about,
            "messages": [{"$ref": f"{at}/messages/{name}"} for name in messages],
        }

    def _channel(self, servers: list[str], address: str, messages: dict[str, Part], bound: Binding = NO_BINDING) -> str:
        """Add messages to the channel of an address at some servers; return its name."""
        at: Part = {"servers": [{"$ref": _pointer("servers", server)} for server in servers]} if servers else {}
        at |= {"bindings": dict(bound)} if bound else {}
        for name in _names(address):
            channel = self.channels.setdefault(name, {"address": address, **at, "messages": {}})
            if channel["address"] == address and all(channel.get(each) == at.get(each) for each in _OF_A_CHANNEL):
                channel["messages"] |= messages
                return name
        raise AssertionError

    def _servers(self, broker: Broker, address: str) -> list[str]:
        """Return the names of a broker's servers, added if they are new."""
        names = []
        for each in address.split(","):
            at = urlsplit(each if "://" in each else f"//{each}")
            protocol = (broker.asyncapi.of_schemes and at.scheme) or broker.asyncapi.protocol or broker.name
            server = {"host": at.netloc, "protocol": protocol} | ({"pathname": at.path} if at.path else {})
            for name in _names(f"{broker.name}-{at.netloc}{at.path}"):
                if self.servers.setdefault(name, server) == server:
                    break
            names.append(name)
        return names


@dataclass(frozen=True, slots=True)
class _Like:
    """What the messages of a bridge have in common; by default of none."""

    bindings: Binding = field(default_factory=dict)
    content_type: str | None = None
    headers: Part | None = None

    def typed(self, topic: Topic[Any, Any], those: Part) -> Part:
        """Return the message of a typed topic; `those` are headers that only it has."""
        # Without this header a value is of version 1.
        those = those | {SCHEMA: {"const": str(topic.version)}}
        payload = {"$ref": f"{PLACE}{name_of(topic)}"}
        return {"name": topic.name, **self._form(those, [SCHEMA] if topic.version > 1 else []), "payload": payload}

    def untyped(self, those: Part) -> Part:
        """Return a message of whose value nothing is known."""
        return self._form(those, [])

    def _form(self, those: Part, required: list[str]) -> Part:
        form: Part = {"headers": {"type": "object", "properties": those}}
        if required:
            form["headers"]["required"] = required
        if self.headers is not None:
            form["headers"] = form["headers"] | {"allOf": [self.headers]} if those else self.headers
        if self.content_type is not None:
            form["contentType"] = self.content_type
        if self.bindings:
            form["bindings"] = dict(self.bindings)
        return form


def _names(text: str) -> Iterator[str]:
    """Yield names that stand for a text, without end: the first one that stands for no other text is taken."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "all"
    yield name
    yield from (f"{name}-{nth}" for nth in count(2))


def _pointer(*steps: str) -> str:
    return "#/" + "/".join(steps)


def _others(patterns: list[str], known: list[str]) -> Part:
    """Return the schema of topics that these patterns fit, and that are not known; roughly, if there is a pattern."""
    return {"not": {"enum": known}} if any(map(_is_pattern, patterns)) else {"enum": patterns}


def _is_pattern(topic: str) -> bool:
    return ONE in topic or MANY in topic


def _sent(bridge: OutState) -> str:
    how = "exactly once" if bridge.settings.exactly_once else "at least once"
    tombstones = " A message of event type D is a record without a value." if bridge.settings.form.tombstones else ""
    return f"Published by bridge {bridge.name}, {how}.{tombstones}"
