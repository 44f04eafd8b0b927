"""What is done to a node: at its statements, to its daemons, its connections and its server, and as it recovers."""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from mailroom.errors import EmbeddedServerError
from tests.faults.actors import Actor
from tests.faults.failpoints import COMMANDS, Failpoint
from tests.faults.host import Host
from tests.faults.links.struck import LOST, StruckNode
from tests.faults.network import QUIET, Trouble

OWN_SERVER, OTHER_SERVER = "its own server killed behind it", "another server killed behind it"
# When and action of a failpoint. The whole process is gone if it is killed, and only one session if that is cut.
WAYS = {
    "killed before it": ("before", "kill"),
    "killed behind it": ("after", "kill"),
    "connection cut": ("before", "cut"),
    "sent and killed": ("before", "kill when sent"),
    "sent and its answer lost": ("before", "cut when sent"),
    "paused": ("before", "stop"),
    OWN_SERVER: ("after", "stop"),
    OTHER_SERVER: ("after", "stop"),
}
# Half of the statements that are struck are of these, by which messages and promises go from node to node.
CENTRAL = (
    "dispatcher.delivery.deliver.DELIVER_FULL", "dispatcher.delivery.deliver.DISPATCH_LOCK",
    "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE",
    "dispatcher.links.at_source.acknowledge.FLUSH", "dispatcher.links.at_source.bounds.BOUNDS",
    "dispatcher.links.at_source.fetch.FETCH_UNDECODED",
    "dispatcher.links.receive.RECEIVE", "dispatcher.housekeeping.trim.TRIM", "mailroom.order.clock.CEILING",
    "mailroom.links.marks.MARK", "mailroom.order.total.RAISE",
)  # fmt: skip
CENTRAL_SHARE = 0.5
SERVER_SHARE = 0.3  # of what is struck as it recovers: the server was killed, and not the daemons
TROUBLES = ("cut before COMMIT", "COMMIT answer lost", "half of COMMIT", "COMMIT delayed", "black hole")
AIMED = 0.7
COMMIT_SHARE = 0.4  # of what is struck at a statement
LED_WITHIN_S = 2.0
PASSED_WITHIN_S = 1.0
LINGERS_S = 0.3  # before a server is killed: so long others may read what it just committed
RECOVERS_WITHIN_S = 4.0
TAKEN_OVER_WITHIN_S = 10.0
TROUBLED_S = (0.3, 1.5)
IN_RECOVERY = "was interrupted while in recovery"
MOST_RECOVERY_S = 0.15


@dataclass(frozen=True, slots=True)
class Aim:
    """Statements, and a way, to strike most of the time."""

    names: tuple[str, ...]
    way: str


class Tally:
    """What happened to all nodes; free to share between threads. Counts only what happened, not what was tried."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.points: Counter[tuple[str, str]] = Counter()  # a statement, and in which way it was struck
        self.missed = 0
        self.violations: list[str] = []
        self._lock = threading.Lock()

    def did(self, kind: str, times: int = 1) -> None:
        """Count faults."""
        with self._lock:
            self.kinds[kind] += times

    def struck(self, name: str, way: str, *, again: bool = False) -> None:
        """Count a fault at a statement."""
        what = name if name in COMMANDS else "call of Kafka's client" if name.startswith("kafka ") else "statement"
        self.did(f"{'as it recovers, ' * again}{what} {way}")
        with self._lock:
            self.points[name, way] += 1

    def missed_one(self) -> None:
        """Count a failpoint that was not passed in time."""
        with self._lock:
            self.missed += 1


class Striker:
    """Strikes one node, one fault after the other; those of other nodes strike at the same time."""

    central: Sequence[str] = CENTRAL
    ways: Mapping[str, tuple[str, str]] = WAYS
    passed_within_s = PASSED_WITHIN_S

    def __init__(self, node: StruckNode, tally: Tally, seed: int, aim: Aim | None = None) -> None:
        self._node = node
        self._aim = aim
        self._tally = tally
        self._dice = random.Random(f"{seed} {node.name}")
        self._passes: dict[str, Counter[str]] = {}  # by daemon
        self._known: set[str] = set()  # what daemons pass at all
        self._kinds: dict[Callable[[], None], int] = {
            self._at_statement: 50,
            self._again: 12,
            self._kill: 8,
            self._kill_both: 4,
            self._pause: 6,
            self._cut: 8,
            self._trouble: 6,
            self._crash: 5,
            self._stop: 3,
            self._crash_in_recovery: 2,
        }

    def strike(self) -> None:
        """Make one fault, drawn from the seed."""
        if self._aim is not None and self._dice.random() < AIMED:
            with contextlib.suppress(*LOST):
                self._strike_at(self._leader(), self._dice.choice(self._aim.names), self._aim.way)
            return
        [kind] = self._dice.choices(list(self._kinds), list(self._kinds.values()))
        with contextlib.suppress(*LOST):
            kind()

    # -- At a statement ------------------------------------------------------------------------------------------------

    def _leader(self) -> Actor:
        """Return who delivers, or who reads, once somebody does."""
        role = self._dice.choice(("dispatcher", "links", "links"))
        deadline = time.monotonic() + LED_WITHIN_S
        while (leader := self._node.leaders().get(role)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return leader or self._dice.choice(self._node.daemons)

    def _passing(self, daemon: Actor) -> list[str]:
        """Return the statements that a daemon has passed since this was asked last."""
        daemon.ask_passes()
        now = Counter({name: n for name, n in daemon.passes.items() if not name.startswith("await ") and name != "?"})
        before = self._passes.get(daemon.task.name, Counter())
        self._passes[daemon.task.name] = now
        self._known |= now.keys()
        return sorted(now - before)

    def _at_statement(self) -> None:
        daemon = self._leader()
        passing = self._passing(daemon)
        name = self._choice(passing)
        self._strike_at(daemon, name, self._way(name))

    def _way(self, name: str) -> str:
        return self._dice.choice(list(WAYS))

    def _choice(self, passing: Sequence[str]) -> str:
        if not passing or self._dice.random() < COMMIT_SHARE:
            return "COMMIT"
        central = [name for name in passing if name in self.central]
        return self._dice.choice(central if central and self._dice.random() < CENTRAL_SHARE else passing)

    def _strike_at(self, daemon: Actor, name: str, way: str) -> None:
        nth = self._dice.randint(1, 4) if name in COMMANDS else 1
        if daemon.arm(Failpoint(name, *self.ways[way], nth)) and daemon.hit.wait(self.passed_within_s):
            self._struck(daemon, name, way)
        else:
            daemon.disarm()
            self._tally.missed_one()

    def _struck(self, daemon: Actor, name: str, way: str, *, again: bool = False) -> None:
        if way in (OWN_SERVER, OTHER_SERVER):
            try:
                time.sleep(self._dice.uniform(0, LINGERS_S))
                victim = self._node if way == OWN_SERVER else self._dice.choice(self._node.others)
                with down(victim, self._tally) as host:
                    host.kill()
            finally:
                daemon.signal(signal.SIGCONT)
        elif self.ways[way][1] == "stop" and self._other_works(daemon):
            way = f"{way}, and the other daemon worked"
        self._tally.struck(name, way, again=again)

    def _again(self) -> None:
        """Kill both daemons, or the server, and strike who recovers from that at one of its first statements."""
        if not self._known:
            return
        name = self._dice.choice(sorted(self._known))
        way = self._way(name)
        failpoint = Failpoint(name, *self.ways[way], self._dice.randint(1, 2))
        if self._dice.random() < SERVER_SHARE:
            self._crash()
            for daemon in self._node.daemons:
                daemon.arm(failpoint)
        else:
            for daemon in self._node.daemons:
                daemon.restart(failpoint)
            self._tally.did("both daemons killed")
        deadline = time.monotonic() + RECOVERS_WITHIN_S
        left = list(self._node.daemons)
        while len(left) == len(self._node.daemons) and time.monotonic() < deadline:
            for daemon in [each for each in left if each.hit.wait(0.02)]:
                left.remove(daemon)
                self._struck(daemon, name, way, again=True)
        for daemon in left:
            daemon.disarm()
        if len(left) == len(self._node.daemons):
            self._tally.missed_one()

    # -- Daemons -------------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        self._leader().signal(signal.SIGKILL)
        self._tally.did("daemon killed")

    def _kill_both(self) -> None:
        for daemon in self._node.daemons:
            daemon.signal(signal.SIGKILL)
        self._tally.did("both daemons killed")

    def _pause(self) -> None:
        daemon = self._leader()
        daemon.signal(signal.SIGSTOP)
        self._tally.did("daemon paused, and the other daemon worked" if self._other_works(daemon) else "daemon paused")

    def _other_works(self, paused: Actor) -> bool:
        """Wait until the other daemon leads in all roles and has worked; then let the paused one go on."""
        try:
            deadline = time.monotonic() + TAKEN_OVER_WITHIN_S
            clock = None
            while time.monotonic() < deadline:
                with contextlib.suppress(*LOST):
                    leaders = self._node.leaders()
                    if len(leaders) == 2 and paused not in leaders.values():
                        clock = self._node.clock() if clock is None else clock
                        if self._node.clock() > clock:
                            return True
                time.sleep(0.05)
            return False
        finally:
            paused.signal(signal.SIGCONT)

    # -- Connections ---------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        self._dice.choice(self._node.networks).cut()
        self._tally.did("all connections of a daemon cut")

    def _trouble(self) -> None:
        network = self._dice.choice(self._node.networks)
        kind = self._dice.choice(TROUBLES)
        before = network.done[kind]
        network.be(Trouble(kind, 0.5, 0.2))
        time.sleep(self._dice.uniform(*TROUBLED_S))
        network.be(QUIET)
        if network.done[kind] > before:
            self._tally.did(f"network: {kind}")

    # -- The server ----------------------------------------------------------------------------------------------------

    def _crash(self) -> None:
        with down(self._node, self._tally) as host:
            host.kill()
        self._tally.did("server killed")

    def _stop(self) -> None:
        mode, kind = self._dice.choice(((signal.SIGINT, "fast"), (signal.SIGQUIT, "immediate")))
        with down(self._node, self._tally) as host:
            host.stop(mode)
        self._tally.did(f"server stopped, {kind}")

    def _crash_in_recovery(self) -> None:
        """Kill the server, and again while it recovers: it counts if the server says so."""
        with down(self._node, self._tally) as host:
            host.kill()
            self._tally.did("server killed")
            starting = threading.Thread(target=_tried, args=(host.start,))
            starting.start()
            until = time.monotonic() + self._dice.uniform(0, MOST_RECOVERY_S)
            while starting.is_alive() and time.monotonic() < until:
                time.sleep(0.002)
            _tried(host.kill)
            starting.join()
        last = host.directory / "server.log"
        in_recovery = IN_RECOVERY in last.read_text(errors="replace")
        self._tally.did("server killed again in its recovery" if in_recovery else "server killed")


@contextlib.contextmanager
def down(node: StruckNode, tally: Tally) -> Iterator[Host]:
    """Let the server be taken down in this block, and bring it back. Nobody may rely on what it has forgotten."""
    with node.server:
        yield node.host
        known = node.known_elsewhere()
        node.bring_back()
        tally.violations += node.forgotten(*known)


def _tried(work: Callable[[], None]) -> None:
    # There may be nothing to kill yet; and who starts a server that is killed is told so.
    with contextlib.suppress(EmbeddedServerError, OSError, IndexError, ValueError, psutil.Error):
        work()
