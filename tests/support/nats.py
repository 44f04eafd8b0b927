"""A NATS server with JetStream of a test's own."""

import shutil
from pathlib import Path

from tests.support.port import free_port
from tests.support.processes import Broker, ServerProcess, answer


def nats_program() -> str | None:
    """Return the server's program, if it is installed."""
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin")


class Nats(Broker):
    """nats-server at `url`, with these `settings` of its file; its streams are kept in `directory`."""

    def __init__(self, directory: Path, settings: str = "") -> None:
        super().__init__(directory)
        self._settings = settings
        self._port = free_port()
        self.url = f"nats://127.0.0.1:{self._port}"

    def _launch(self) -> ServerProcess:
        program = nats_program()
        assert program, "make brokers"
        settings = self._directory / "settings"
        settings.write_text(self._settings)
        kept = self._directory / "streams"
        return ServerProcess(
            [program, "-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", kept, "-c", settings], log=self.log
        )

    def _answers(self) -> bool:
        return answer(self._port).startswith(b"INFO ")
