"""The settings of a bridge, as the node keeps them. What is secret is not among them: see `environment`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from mailroom.bridges.arrival import Intake
from mailroom.bridges.rabbitmq_address import amqp_servers
from mailroom.bridges.record import Form
from mailroom.bridges.webhook_url import stored_url
from mailroom.errors import ConfigurationError
from mailroom.names import MAX_COUNT
from mailroom.numbers import whole

OnFailure: TypeAlias = Literal["stop", "skip"]

BROKERS = ("kafka", "nats", "rabbitmq", "webhook")
# A publisher of a user's own: `module:Class`.
OWN_BROKER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z", re.ASCII)
# A user and a password before the host. A broker's address is stored and shown.
USERINFO = re.compile(r"(^|/|,)[^/,@\s]*@")
EXCHANGE = re.compile(r"[A-Za-z0-9_.:/-]{0,255}\Z")
FIELDS = ("format", "encode", "tombstones")


def broker_name(broker: str) -> str:
    """Return `broker` if it is a broker that Mailroom knows, or names a class as `module:Class`."""
    if broker not in BROKERS and not OWN_BROKER.match(broker):
        raise ConfigurationError(
            f"{broker!r} is no broker: give one of {', '.join(BROKERS)}, or a class of your own as module:Class.",
            code="MR-bridge-settings",
        )
    return broker


def address_text(address: str) -> str:
    """Return `address` if it names one or several servers and holds no login, which would be stored and shown."""
    if not address or address != address.strip() or re.search(r"[\x00-\x20]", address):
        raise ConfigurationError("A broker's address is HOST:PORT, or several of them.", code="MR-bridge-settings")
    if USERINFO.search(address):
        raise ConfigurationError(
            "A broker's address is stored and shown, so it holds no user and no password: give these to the dispatcher "
            "by its environment (MAILROOM_BRIDGE_<NAME>_...).",
            code="MR-bridge-settings",
        )
    return address


@dataclass(frozen=True, slots=True)
class OutSettings:
    """How a bridge publishes: to which `broker`, at which `address`, and in which `form`.

    With `exactly_once` the broker keeps, in each of its transactions, a mark of what was published; `mark_topic` is the
    topic at the broker under which Kafka keeps it. `on_failure` says what happens with a message that the broker
    refuses or that the form cannot hold: `stop`, so that nothing is published before somebody acts, or `skip`, so that
    it goes to `dead_letter`. `exchange` is RabbitMQ's: without one the topic of a record names its queue. Raises
    `ConfigurationError`.
    """

    broker: str
    address: str
    form: Form = field(default_factory=Form)
    exactly_once: bool = False
    mark_topic: str | None = None
    on_failure: OnFailure = "stop"
    exchange: str = ""

    def __post_init__(self) -> None:
        """Check the settings against each other."""
        broker_name(self.broker)
        if self.broker == "webhook":
            self._check_webhook()
        else:
            address_text(self.address)
        self._check_rabbitmq()
        if self.on_failure not in get_args(OnFailure):
            raise ConfigurationError("on_failure is stop or skip.", code="MR-bridge-settings")
        if self.exactly_once and self.broker == "nats":
            raise ConfigurationError(
                "NATS needs no exactly_once: its stream keeps the mark. Leave it out.", code="MR-bridge-settings"
            )
        if self.exactly_once and self.mark_topic is None:
            raise ConfigurationError(
                "With exactly_once the broker keeps a mark beside the records, under one topic that exists there. This "
                "bridge publishes to several topics: name one of them (--mark-topic).",
                code="MR-bridge-settings",
            )

    def _check_webhook(self) -> None:
        stored_url(self.address)
        if self.exactly_once or self.form.format != "cloudevents":
            raise ConfigurationError(
                "Webhooks are at least once, and the format is cloudevents: leave out --exactly-once and --format.",
                code="MR-bridge-settings",
            )

    def _check_rabbitmq(self) -> None:
        if self.broker != "rabbitmq":
            if self.exchange:
                raise ConfigurationError("Only RabbitMQ has an exchange.", code="MR-bridge-settings")
            return
        amqp_servers(self.address)
        if self.exactly_once:
            raise ConfigurationError(
                "RabbitMQ is at least once, and its readers know repeats by their ids: leave out exactly_once.",
                code="MR-bridge-settings",
            )
        if not isinstance(self.exchange, str) or not EXCHANGE.match(self.exchange):
            raise ConfigurationError(
                "The name of an exchange has at most 255 letters, digits and - _ . : / characters. Without a name it "
                "is the default one.",
                code="MR-bridge-settings",
            )

    def text(self) -> str:
        """Return the settings as the database keeps them."""
        form = {name: getattr(self.form, name) for name in FIELDS}
        return json.dumps(
            {
                "broker": self.broker, "address": self.address, "topic": self.form.topic, **form,
                "exactly_once": self.exactly_once, "mark_topic": self.mark_topic, "on_failure": self.on_failure,
                "exchange": self.exchange,
            }
        )  # fmt: skip

    @classmethod
    def of(cls, text: str) -> "OutSettings":
        """Read what `text` returned."""
        kept: Mapping[str, Any] = json.loads(text)
        form = Form(kept["topic"], **{name: kept[name] for name in FIELDS})
        return cls(
            kept["broker"], kept["address"], form, kept["exactly_once"], kept["mark_topic"], kept["on_failure"],
            kept["exchange"],
        )  # fmt: skip


Start: TypeAlias = Literal["earliest", "latest"]
MAX_ORIGINS = 1_000  # unless somebody says otherwise: whoever writes to the topic can make them up
INTAKE = ("as_topic", "key", "decode")


@dataclass(frozen=True, slots=True)
class InSettings:
    """How a bridge takes in: from which `topics` of which `broker`, at which `address`, and how by `intake`.

    At NATS the one topic is a stream, at RabbitMQ the topics are queues.

    `start` says where it begins in a log of which it has read nothing yet: with the `earliest` record there, or with
    what comes from now on (`latest`). `on_failure` says what happens with a record that is no message: it goes to
    `dead_letter` (`skip`), or nothing is taken in before somebody acts (`stop`). It knows at most `max_origins` links
    of nodes that publish there; a record of one more is no message. Raises `ConfigurationError`.
    """

    broker: str
    address: str
    topics: tuple[str, ...]
    intake: Intake = field(default_factory=Intake)
    start: Start = "earliest"
    on_failure: OnFailure = "skip"
    max_origins: int = MAX_ORIGINS

    def __post_init__(self) -> None:
        """Check all."""
        broker_name(self.broker)
        if self.broker == "webhook":
            raise ConfigurationError(
                "Webhooks are taken in by a server of its own: mailroom bridge serve", code="MR-bridge-settings"
            )
        address_text(self.address)
        if self.broker == "rabbitmq":
            amqp_servers(self.address)
            if self.start != "earliest":
                raise ConfigurationError(
                    "A queue of RabbitMQ gives out what it has, from its beginning: leave out --start.",
                    code="MR-bridge-settings",
                )
        if not self.topics or not all(isinstance(topic, str) and topic for topic in self.topics):
            raise ConfigurationError("Name the topics at the broker that are taken in.", code="MR-bridge-settings")
        whole(self.max_origins, "max_origins", 1, MAX_COUNT, ConfigurationError)
        if self.start not in get_args(Start):
            raise ConfigurationError("start is earliest or latest.", code="MR-bridge-settings")
        if self.on_failure not in get_args(OnFailure):
            raise ConfigurationError("on_failure is stop or skip.", code="MR-bridge-settings")

    def text(self) -> str:
        """Return the settings as the database keeps them."""
        intake = {name: getattr(self.intake, name) for name in INTAKE}
        return json.dumps(
            {
                "broker": self.broker, "address": self.address, "topics": list(self.topics), **intake,
                "start": self.start, "on_failure": self.on_failure, "max_origins": self.max_origins,
            }
        )  # fmt: skip

    @classmethod
    def of(cls, text: str) -> "InSettings":
        """Read what `text` returned."""
        kept: Mapping[str, Any] = json.loads(text)
        intake = Intake(**{name: kept[name] for name in INTAKE})
        return cls(
            kept["broker"], kept["address"], tuple(kept["topics"]), intake, kept["start"], kept["on_failure"],
            kept["max_origins"],
        )  # fmt: skip
