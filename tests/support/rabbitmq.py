"""A RabbitMQ node of a test's own."""

import os
import shutil
from pathlib import Path

from mailroom.embedded.account import server_account
from tests.support.port import free_port
from tests.support.processes import Broker, ServerProcess, answer
from tests.support.waiting import eventually

# What a client says first, and how the server's first method begins: a frame on channel 0.
GREETING = b"AMQP\x00\x00\x09\x01"
METHOD = b"\x01\x00\x00"
MAX_MESSAGE_BYTES = 1_000_000  # so that a test can send more


def rabbitmq_program() -> str | None:
    """Return the server's program, if it is installed."""
    # Not Debian's in /usr/sbin: that one runs as its own account, with its own folders.
    folder = "/usr/lib/rabbitmq/bin"
    return shutil.which("rabbitmq-server", path=folder) or shutil.which("rabbitmq-server")


class RabbitMQ(Broker):
    """rabbitmq-server at `url`, whose queues are kept in `directory`; the server's account has to reach that.

    It has a name service (epmd) of its own, which ends with it: the machine's would outlive the test. `more` are lines
    of its rabbitmq.conf.
    """

    def __init__(self, directory: Path, *more: str) -> None:
        super().__init__(directory)
        self._account = server_account()
        if self._account.switched:
            os.chown(directory, self._account.uid, self._account.gid)
        self.port, self._names_port, distribution = free_port(), free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        plugins, settings = directory / "enabled_plugins", directory / "rabbitmq.conf"
        plugins.write_text("[].")
        own = ("log.console = true", "log.console.level = warning", "log.file = false")
        settings.write_text("\n".join([*own, f"max_message_size = {MAX_MESSAGE_BYTES}", *more, ""]))
        for file in (plugins, settings):
            file.chmod(0o644)
        self._environment = {
            "HOME": str(directory),  # of the cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._names_port),
            "RABBITMQ_NODENAME": f"mailroom-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
            "RABBITMQ_CONFIG_FILE": str(settings),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "logs"),
            "RUNNING_UNDER_SYSTEMD": "true",  # the program becomes the server, instead of waiting for it
        }
        self._names: ServerProcess | None = None

    def keeps(self, queue: str) -> bool:
        """Tell whether a quorum queue outlives a kill by now.

        The node writes its name to the disk half a second after the queue was made. Killed before that, it makes
        another, empty one in its place when it starts again, which does not even answer.
        """
        return any(
            f"_{queue}".encode() in file.read_bytes() for file in self._directory.glob("mnesia/*/quorum/*/names.dets")
        )

    def control(self, *words: str) -> None:
        """Have rabbitmqctl do something at the node."""
        program = rabbitmq_program()
        assert program, "make brokers"
        node = self._environment["RABBITMQ_NODENAME"]
        ctl = self._run(str(Path(program).with_name("rabbitmqctl")), "-n", node, *words)
        try:
            assert ctl.ended() == 0, self.log.read_text(errors="replace")[-2_000:]
        finally:
            ctl.kill()

    def close(self) -> None:
        """End it for good, with its name service."""
        super().close()
        if self._names is not None:
            self._names.kill()
            self._names = None

    def _launch(self) -> ServerProcess:
        program = rabbitmq_program()
        assert program, "make brokers"
        if self._names is None:
            # Before the node starts one, which would not end with it.
            self._names = self._run("epmd")
            eventually(lambda: answer(self._names_port, b"\x00\x01n"))
        return self._run(program)

    def _run(self, program: str, *words: str) -> ServerProcess:
        return ServerProcess([program, *words], log=self.log, environment=self._environment, account=self._account)

    def _answers(self) -> bool:
        return answer(self.port, GREETING).startswith(METHOD)
