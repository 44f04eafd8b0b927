"""An Apache Kafka of a test's own: one node, which is its broker and its controller."""

import os
import shutil
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.port import free_port
from tests.support.processes import Broker, ServerProcess, answer
from tests.support.waiting import WITHIN_S

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

USER = "mailroom"
POM = Path(__file__).with_name("kafka.pom.xml")

# The thorough compiler pays only in a server that runs for long.
JAVA_OPTIONS = ("-Xms64m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")

# Internal topics have one partition, where 50 would be made at their first use. Nobody is waited for before a group
# begins. And the controller remembers what was killed for two seconds and not nine, in which it may not come back.
SETTINGS = {
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,CLIENTS:PLAINTEXT",
    "inter.broker.listener.name": "CLIENTS",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    "log.cleaner.dedupe.buffer.size": str(4 * 1024**2),
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
}

# ApiVersions, without headers: a request that a listener answers also before a login.
GREETING = b"\0\0\0\x0a\0\x12\0\0\0\0\0\1\xff\xff"

LOGGING = """
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
"""


def kafka_jars() -> Path | None:
    """Return the folder that `make kafka` fills, or MAILROOM_KAFKA_JARS; None if Kafka or Java is missing."""
    folder = Path(os.environ.get("MAILROOM_KAFKA_JARS") or Path(__file__).parents[2] / ".kafka")
    return folder if any(folder.glob("kafka_2.13-*.jar")) and java_program() else None


def spark_kafka_jars() -> list[Path]:
    """Return Spark's source for Kafka, which `make kafka` puts into a folder there; none if it or Kafka is missing."""
    folder = kafka_jars()
    return [] if folder is None else sorted((folder / "spark").glob("*.jar"))


def java_program() -> str | None:
    """Return Java's program, if it is installed."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None)


def java_command(*arguments: str) -> list[str]:
    """Return the command that runs a program of Kafka's."""
    jars, java = kafka_jars(), java_program()
    assert jars, "make kafka"
    assert java
    return [java, *JAVA_OPTIONS, "-cp", f"{jars}/*", *arguments]


def cluster_id() -> str:
    """Return the id of a new cluster."""
    return urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def format_storage(settings: Path, cluster: str) -> None:
    """Make the folders that a server with this file of settings begins with; fail if it would refuse the file."""
    done = subprocess.run(
        java_command("kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(settings)),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def properties(settings: Mapping[str, object]) -> str:
    """Return the text of a file of settings."""
    return "".join(f"{name}={value}\n" for name, value in settings.items())


class Kafka(Broker):
    """A server at `bootstrap`, whose topics are kept in `directory`. It makes no topic by itself.

    With a `password` it takes only clients that log in as USER with it, by SASL/PLAIN without TLS. `front` makes a
    proxy before a port and returns that of the proxy: clients that begin at `fronted` take no way but through it. One
    that is `beside` another is a further broker of its cluster, whose controller the first one is.
    """

    def __init__(
        self, directory: Path, *, password: str | None = None, front: Callable[[int], int] | None = None,
        beside: "Kafka | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(directory)
        self._port = free_port()
        self._node: int = 1 if beside is None else beside._node + 1
        self._cluster: str = cluster_id() if beside is None else beside._cluster
        self._controller: str = f"127.0.0.1:{free_port()}" if beside is None else beside._controller
        self.bootstrap = self.fronted = f"127.0.0.1:{self._port}"
        self._password = password
        self._admin: AdminClient | None = None
        self._settings = directory / "server.properties"
        settings = SETTINGS | {
            "process.roles": "broker,controller" if beside is None else "broker",
            "node.id": str(self._node),
            "listeners": f"CLIENTS://{self.bootstrap}",
            "advertised.listeners": f"CLIENTS://{self.bootstrap}",
            "controller.quorum.voters": f"1@{self._controller}",
            "log.dirs": str(directory / "data"),
        }
        if beside is None:
            settings["listeners"] += f",CONTROLLER://{self._controller}"
        if front is not None:
            port = free_port()
            self.fronted = f"127.0.0.1:{front(port)}"
            settings["listeners"] += f",FRONTED://127.0.0.1:{port}"
            settings["advertised.listeners"] += f",FRONTED://{self.fronted}"
            settings["listener.security.protocol.map"] += ",FRONTED:PLAINTEXT"
        if password is not None:
            login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
            settings |= {
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
                "sasl.enabled.mechanisms": "PLAIN",
                "sasl.mechanism.inter.broker.protocol": "PLAIN",
                "listener.name.clients.plain.sasl.jaas.config": (
                    f'{login} username="{USER}" password="{password}" user_{USER}="{password}";'
                ),
            }
        self._settings.write_text(properties(settings))
        (directory / "log4j2.properties").write_text(LOGGING)

    @property
    def client(self) -> dict[str, str | int | float | bool]:
        """What a client of librdkafka needs to reach it."""
        settings: dict[str, str | int | float | bool] = {"bootstrap.servers": self.bootstrap}
        if self._password is not None:
            settings |= {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
            settings |= {"sasl.username": USER, "sasl.password": self._password}
        return settings

    def create(self, topic: str, partitions: int, **config: object) -> None:
        """Make a topic with settings as in `retention_ms=1000`."""
        from confluent_kafka.cimpl import NewTopic

        settings = {name.replace("_", "."): str(value) for name, value in config.items()}
        [made] = self.admin.create_topics(
            [NewTopic(topic, partitions, 1, config=settings)], request_timeout=WITHIN_S
        ).values()
        made.result()

    @property
    def admin(self) -> "AdminClient":
        """Its administration."""
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            # By itself it waits for up to ten seconds before it connects again.
            self._admin = AdminClient({**self.client, "log_level": 0, "reconnect.backoff.max.ms": 300})
        return self._admin

    def _launch(self) -> ServerProcess:
        if not (self._directory / "data").exists():
            format_storage(self._settings, self._cluster)
        logging = f"-Dlog4j2.configurationFile={self._directory / 'log4j2.properties'}"
        return ServerProcess(java_command(logging, "kafka.Kafka", str(self._settings)), log=self.log)

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException

        # The client by itself waits longer after each refusal.
        if not answer(self._port, GREETING):
            return False
        try:
            return self._node in self.admin.list_topics(timeout=1).brokers
        except KafkaException:
            return False
