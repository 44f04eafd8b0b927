"""The server, the dispatcher, the writers' processes and their input; and the count of what came of it."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
from psycopg import conninfo

from mailroom import create_inbox, schema
from mailroom.values import codec
from tests.faults.host import Host
from tests.spark.campaign.lanes import LANES

ROWS, LARGE = 60, 12_000  # of a file; a large one is more than a chunk
SETTLED_WITHIN_S = 300.0
ORDERED = ("streamed", "batched", "jobs")  # a shuffle has no order


class NotSettled(Exception):
    """A writer did not come to its end."""


class Lane:
    """One writer: its input, and its process, which is started anew whenever it has ended."""

    def __init__(self, name: str, directory: Path, dsn: str) -> None:
        self.name = name
        self.sent = self.starts = 0
        self._directory = directory
        self._dsn = dsn
        self._files = 0
        self._process: subprocess.Popen[bytes] | None = None
        for part in ("source", "done"):
            (directory / part).mkdir(parents=True)

    def feed(self, rows: int) -> None:
        """Give it a file of new rows; a stateful writer gets each of them twice."""
        ids = range(self.sent, self.sent + rows)
        lines = [json.dumps({"id": id}) + "\n" for id in ids for _ in range(1 + (self.name == "stateful"))]
        file = self._directory / "source" / f"{self._files:06}.json"
        unfinished = file.with_suffix(".part")
        unfinished.write_text("".join(lines))
        os.utime(unfinished, (self._files, self._files))  # Spark takes files in the order of their age
        unfinished.rename(file)
        self._files += 1
        self.sent += rows

    @property
    def left(self) -> int:
        """How many files it has not done."""
        return self._files - sum(1 for _ in (self._directory / "done").iterdir())

    def processes(self) -> list[psutil.Process]:
        """Return its driver and all below it; none if it does not run."""
        if self._process is None or self._process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self._process.pid)
            return [driver, *driver.children(recursive=True)]
        return []

    def keep_up(self) -> None:
        """Start it, unless it runs."""
        if self._process is None or self._process.poll() not in (None, 0):
            self.kill()
            self.starts += 1
            with (self._directory / "log").open("ab") as log:
                command = [
                    sys.executable,
                    "-m",
                    "tests.spark.campaign.lanes",
                    self.name,
                    self._dsn,
                    str(self._directory),
                ]
                self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        """Kill its driver and all below it, as a machine that fails does."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait()

    def finish(self) -> None:
        """Let it do what is left and end."""
        (self._directory / "stop").touch()
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while self._process is None or self._process.poll() != 0:
            if time.monotonic() > deadline:
                raise NotSettled(f"{self.name}: {self.left} files left; see its log:\n{self.log()[-4_000:]}")
            self.keep_up()
            time.sleep(0.2)

    def log(self) -> str:
        """Return what it has printed."""
        return (self._directory / "log").read_text(errors="replace")


class Stage:
    """All of it; `lot` draws what is fed and what goes wrong."""

    def __init__(self, home: Path, lot: random.Random) -> None:
        self.lot = lot
        self.host = Host(home / "server")
        self._home = home
        self.lanes: list[Lane] = []
        self._dispatcher: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the server and make the node; in the end stop all."""
        self.host.start()
        try:
            schema.migrate(self.host.dsn)
            with self.host.session() as session, session.transaction():
                for name in LANES:
                    create_inbox(session, name)
            parts = conninfo.conninfo_to_dict(self.host.dsn)
            os.environ["PGPASSWORD"] = str(parts.pop("password"))  # no option of Spark may hold it
            dsn = conninfo.make_conninfo("", **parts)
            self.lanes = [Lane(name, self._home / name, dsn) for name in LANES]
            yield
        finally:
            for lane in self.lanes:
                lane.kill()
            self.kill_dispatcher()
            self.host.close()

    def keep_up(self) -> None:
        """Start what has ended, and feed who has little left."""
        if self._dispatcher is None or self._dispatcher.poll() is not None:
            with (self._home / "dispatcher.log").open("ab") as log:
                command = [sys.executable, "-m", "mailroom", "dispatcher", "run"]
                environment = os.environ | {"MAILROOM_DSN": self.host.dsn}
                self._dispatcher = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        for lane in self.lanes:
            lane.keep_up()
            if lane.left < 3:
                lane.feed(LARGE if self.lot.random() < 0.05 else self.lot.randint(1, ROWS))

    def kill_dispatcher(self) -> None:
        """Kill the dispatcher."""
        if self._dispatcher is not None:
            self._dispatcher.kill()
            self._dispatcher.wait()

    def wrong(self) -> list[str]:
        """Return what is lost, doubled or out of order; for when all writers have finished."""
        found: dict[str, list[int]] = {name: [] for name in LANES}
        keys: dict[tuple[str, str], list[int]] = {}
        with self.host.session() as session:
            rows = session.execute(
                "SELECT topic, key, value FROM (SELECT 0 AS part, clock AS nth, topic, key, value FROM mailroom.inbox "
                "UNION ALL SELECT 1, position, topic, key, value FROM mailroom.outbox) AS m ORDER BY part, nth"
            )
            for topic, key, value in rows:
                id = codec.decode(value)["id"]  # type: ignore[index]  # a map, as it was sent
                found[topic].append(id)
                keys.setdefault((topic, key), []).append(id)
        wrong = []
        for lane in self.lanes:
            counts = Counter(found[lane.name])
            lost = [id for id in range(lane.sent) if id not in counts]
            doubled = [id for id, count in counts.items() if count > 1 or id >= lane.sent]
            wrong += [
                f"{lane.name}: {len(ids)} {what}: {ids[:10]}"
                for what, ids in (("lost", lost), ("doubled", doubled))
                if ids
            ]
        for (topic, key), ids in keys.items():
            if topic in ORDERED and ids != sorted(ids):
                wrong.append(f"{topic}: {key} is out of order")
        return wrong
