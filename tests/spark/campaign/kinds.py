"""What goes wrong; each kind strikes once and returns at whom, or None if there was nobody to strike."""

import signal
import time
from collections.abc import Callable

import psutil

from tests.spark.campaign.stage import Stage

Kind = Callable[[Stage], str | None]
SPARKS = "SELECT {}(pid) FROM pg_stat_activity WHERE application_name LIKE 'mailroom spark%' ORDER BY random() LIMIT {}"
PAUSED_S = 3.0


def driver_killed(stage: Stage) -> str | None:
    """Kill a driver and all below it."""
    lane = stage.lot.choice(stage.lanes)
    if not lane.processes():
        return None
    lane.kill()
    return lane.name


def worker_killed(stage: Stage) -> str | None:
    """Kill a Python process that runs a task, or that Spark plans in."""
    return _one(stage, lambda process: "pyspark.daemon" in process.cmdline(), signal.SIGKILL)


def executor_killed(stage: Stage) -> str | None:
    """Kill an executor of a cluster."""
    return _one(
        stage, lambda process: any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()), signal.SIGKILL
    )


def paused(stage: Stage) -> str | None:
    """Stop a driver and all below it for a while."""
    lane = stage.lot.choice(stage.lanes)
    processes = lane.processes()
    _signal(processes, signal.SIGSTOP)
    time.sleep(PAUSED_S)
    _signal(processes, signal.SIGCONT)
    return lane.name if processes else None


def session_ended(stage: Stage) -> str | None:
    """End one of Spark's sessions."""
    return _sessions(stage, "pg_terminate_backend", 1)


def all_sessions_ended(stage: Stage) -> str | None:
    """End all of Spark's sessions."""
    return _sessions(stage, "pg_terminate_backend", 1_000)


def statement_cancelled(stage: Stage) -> str | None:
    """Cancel what one of Spark's sessions runs."""
    return _sessions(stage, "pg_cancel_backend", 1)


def server_killed(stage: Stage) -> str | None:
    """Kill the server, and bring it back."""
    stage.host.kill()
    return _back(stage)


def server_stopped(stage: Stage) -> str | None:
    """Shut the server down, fast or at once, and bring it back."""
    stage.host.stop(stage.lot.choice([signal.SIGINT, signal.SIGQUIT]))
    return _back(stage)


def dispatcher_killed(stage: Stage) -> str | None:
    """Kill the dispatcher."""
    stage.kill_dispatcher()
    return "dispatcher"


KINDS: tuple[Kind, ...] = (
    driver_killed, worker_killed, executor_killed, paused, session_ended, all_sessions_ended, statement_cancelled,
    server_killed, server_stopped, dispatcher_killed,
)  # fmt: skip


def _one(stage: Stage, fits: Callable[[psutil.Process], bool], number: signal.Signals) -> str | None:
    lanes = stage.lot.sample(stage.lanes, len(stage.lanes))
    for lane in lanes:
        found = []
        for process in lane.processes():
            try:
                if fits(process):
                    found.append(process)
            except psutil.Error:  # it has ended, or is about to
                continue
        if found:
            _signal([stage.lot.choice(found)], number)
            return lane.name
    return None


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _sessions(stage: Stage, function: str, limit: int) -> str | None:
    with stage.host.session() as session:
        struck = session.execute(SPARKS.format(function, limit).encode()).fetchall()
    return f"{len(struck)} sessions" if struck else None


def _back(stage: Stage) -> str:
    time.sleep(stage.lot.random())
    stage.host.start()
    stage.host.await_sessions()
    return "server"
