"""Rounds with a server of their own: clocks that jump, a disk that is full, power that goes, COMMITs that get lost."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from dispatcher.lanes import lease
from tests.faults.host import Host
from tests.faults.invariants import Violation
from tests.faults.report import Report
from tests.faults.stage import NotHandled, Stage, home_of_campaign
from tests.faults.task import Habits

PACE = 600.0
SETTLED_WITHIN_S = 60.0
JUMPS = ("+1h", "-1h", "+10y", "-10y", "+1y", "+30m", "-5s", "+0")
SEEN_S = 1.0  # until all processes have seen that a clock jumped
FAKETIME = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
)
SMALL_MB = 300  # of the disk that fills up
DISK_GB = 6
IMAGE_GB = 1


class Missing(Exception):
    """What a round needs is not on this machine."""


def run(report: Report, seed: int, seconds: float, unknown: int, only: tuple[str, ...]) -> None:
    """Run each round for its share of `seconds`; `unknown` COMMITs are lost and resolved."""
    rounds: dict[str, Callable[[Report, random.Random, float], None]] = {
        "F35": replace_leader, "F21": jump_clocks, "F15": fill_disk, "F22": cut_power,
    }  # fmt: skip
    for nth, (kind, work) in enumerate(rounds.items()):
        if only and kind not in only:
            continue
        try:
            work(report, random.Random(seed + nth), seconds / len(rounds))
        except Missing as reason:
            report.skip(kind, str(reason))
        except NotHandled as error:
            report.wrong(Violation("I11", f"liveness: {kind}", ((str(error),),)))
    if not only or "F33" in only:
        lose_commits(report, seed, unknown)


def _close(stage: Stage, report: Report, kind: str) -> None:
    stage.settle(SETTLED_WITHIN_S)
    found = stage.check()
    for one in found:
        report.wrong(Violation(one.invariant, f"{one.promise} (round {kind})", one.rows))
    report.messages.update(stage.counted())
    report.ended(stage.endings)
    for what, took in stage.liveness.items():
        report.liveness[what] = max(took, report.liveness.get(what, 0.0))


# F35.


def replace_leader(report: Report, dice: random.Random, seconds: float) -> None:
    """Kill or pause the leader, with the lease as it is shipped, and measure how long nobody else leads."""
    habits = Habits(lease_s=lease.LEASE_S)
    with home_of_campaign() as home, Stage(home, dice.randrange(2**31), pace=PACE, habits=habits) as stage:
        stage.cast()
        stage.probe(what="start")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            leader = stage.leader_or_none()
            if leader is None:
                continue
            crash = dice.random() < 0.5
            what = "take-over after a crash" if crash else "take-over after a pause"
            pid, since = leader.pid, time.monotonic()
            leader.signal(signal.SIGKILL if crash else signal.SIGSTOP)
            stage.await_other_leader(pid, since, f"{what}, lease as shipped")
            stage.probe(what=f"after {what}, lease as shipped")
            leader.signal(signal.SIGCONT)
            report.did("F35", "dispatcher")
            time.sleep(dice.uniform(0, 1))
        _close(stage, report, "F35")


# F21.


def jump_clocks(report: Report, dice: random.Random, seconds: float) -> None:
    """Let the clocks of the server and of the processes jump, each by itself, and kill leaders as they do."""
    library = next((path for path in FAKETIME if Path(path).exists()), None)
    if library is None:
        raise Missing("libfaketime is not installed")
    with home_of_campaign() as home:
        clocks = {name: home / f"clock-{name}" for name in ("server", "processes")}
        for path in clocks.values():
            path.write_text("+0")
            path.chmod(0o644)

        def faked(name: str) -> dict[str, str]:
            # Monotonic time is left alone: Python's waiting, and PostgreSQL's, rests on it.
            return {
                "LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(clocks[name]),
                "FAKETIME_CACHE_DURATION": f"{SEEN_S:.0f}", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DISABLE_SHM": "1",
            }  # fmt: skip

        with _environment(faked("server")):
            stage = Stage(
                home,
                dice.randrange(2**31),
                pace=PACE,
                environment=faked("processes"),
                timed=False,
                habits=Habits(failing=0, lease_s=lease.LEASE_S),
            )
            stage.__enter__()
        try:
            stage.cast()
            stage.probe(what="start")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                name = dice.choice(list(clocks))
                # Before the clock jumps, or the leader renews its lease by the new one.
                leader = stage.leader_or_none() if dice.random() < 0.5 else None
                pid, since = 0 if leader is None else leader.pid, time.monotonic()
                if leader is not None:
                    leader.signal(signal.SIGKILL)
                clocks[name].write_text(dice.choice(JUMPS))
                if leader is not None:
                    stage.await_other_leader(
                        pid, since, "take-over after a crash while a clock jumps, lease as shipped"
                    )
                time.sleep(max(0.0, SEEN_S + 0.2 - (time.monotonic() - since)))
                stage.probe(what="after F21")
                if dice.random() < 0.3:
                    dice.choice([*stage.of_role("worker"), *stage.of_role("reaper")]).signal(signal.SIGKILL)
                report.did("F21", name)
            # Ahead of whatever anybody was told to wait for.
            clocks["server"].write_text("+30y")
            clocks["processes"].write_text("+0")
            time.sleep(SEEN_S + 0.2)
            _close(stage, report, "F21")
        finally:
            stage.__exit__(None, None, None)


@contextlib.contextmanager
def _environment(added: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# F15.


def fill_disk(report: Report, dice: random.Random, seconds: float) -> None:
    """Fill the disk of data and WAL, and make room again."""
    with home_of_campaign() as home, _mounted(home / "disk", "-t", "tmpfs", "-o", f"size={SMALL_MB}M", "none") as disk:
        settings = {"max_wal_size": "64MB", "min_wal_size": "32MB", "shared_buffers": "32MB"}
        with Stage(
            home, dice.randrange(2**31), pace=PACE, server_directory=disk / "server", settings=settings
        ) as stage:
            stage.cast()
            stage.probe(what="start")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                fat = disk / "fat"
                with contextlib.suppress(OSError), fat.open("wb") as stream:
                    while True:
                        stream.write(b"\0" * 65_536)
                        stream.flush()
                time.sleep(dice.uniform(0.5, 2.5))
                fat.unlink()
                stage.host.start()  # it may have given up
                stage.host.await_sessions()
                report.did("F15", "server")
                stage.probe(what="after F15")
                time.sleep(dice.uniform(0.2, 1))
            _close(stage, report, "F15")


@contextlib.contextmanager
def _mounted(place: Path, *options: str) -> Iterator[Path]:
    place.mkdir()
    _mount(place, *options)
    try:
        place.chmod(0o755)
        yield place
    finally:
        _unmount(place)


def _mount(place: Path, *options: str) -> None:
    if os.geteuid() != 0:
        raise Missing("needs root, to mount a file system")
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"mount: {done.stderr.strip()}")


def _unmount(place: Path) -> None:
    for _ in range(50):  # a process that was killed lets go of its files a moment later
        if subprocess.run(["umount", str(place)], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True)


# F22.


def cut_power(report: Report, dice: random.Random, seconds: float) -> None:
    """Take the device's content of one instant, kill the server, and go on with what was on the device.

    The data lies on ext4 in a file on btrfs, whose copy-on-write gives that instant. What was written and not synced is
    not in it. The server stands still while the copy is made: nothing is acknowledged that is not to be found there.
    """
    for program in ("mkfs.btrfs", "mkfs.ext4"):
        if shutil.which(program) is None:
            raise Missing(f"{program} is not installed")
    with home_of_campaign() as home:
        disk = home / "disk.btrfs"
        _file(disk, DISK_GB)
        _made("mkfs.btrfs", "-q", disk)
        with contextlib.ExitStack() as stack:
            btrfs = stack.enter_context(_mounted(home / "btrfs", "-o", "loop", str(disk)))
            image = btrfs / "image-0"
            _file(image, IMAGE_GB)
            _made("mkfs.ext4", "-q", image)
            place = stack.enter_context(_mounted(home / "power", "-o", "loop", str(image)))
            stage = stack.enter_context(
                Stage(home, dice.randrange(2**31), pace=PACE, server_directory=place / "server")
            )
            stage.cast()
            stage.probe(what="start")
            end, number = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                time.sleep(dice.uniform(0.1, 1.5))
                number += 1
                image = _cut(stage, btrfs, place, image, number)
                report.did("F22", "server")
                stage.probe(what="after F22")
            _close(stage, report, "F22")


def _cut(stage: Stage, btrfs: Path, place: Path, image: Path, number: int) -> Path:
    left = btrfs / f"image-{number}"
    first = stage.host.postmaster()
    first.suspend()  # before its children are listed: a session that is opened meanwhile would go on
    for process in first.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    _made("cp", "--reflink=always", image, left)
    stage.host.kill()
    _unmount(place)
    image.unlink()
    _mount(place, "-o", "loop", str(left))
    stage.host.start()
    return left


def _file(path: Path, gigabytes: int) -> None:
    with path.open("wb") as stream:
        stream.truncate(gigabytes * 2**30)


def _made(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{command[0]}: {done.stderr.strip()[:120]}")


# F33.


def lose_commits(report: Report, seed: int, unknown: int) -> None:
    """Lose the answers of COMMITs of writers and consumers, and resolve every one of them."""
    from tests.support.unknown_commits import run_unknown_commits

    with home_of_campaign() as home:
        host = Host(home / "server")
        host.start()
        try:
            host.make_node()
            counts = run_unknown_commits(host.dsn, unknown=unknown, seed=seed)
        finally:
            host.close()
    report.did("F33", "writer", counts.unknown)
    asked = counts.committed + counts.rolled_back
    share = 100 * counts.committed / max(1, asked)
    report.notes.append(
        f"unknown commits: {counts.unknown}, of which committed {counts.committed}, rolled back {counts.rolled_back} "
        f"({share:.0f} % committed); {counts.messages} messages, faults {counts.faults}"
    )
    if counts.violations:
        rows = tuple((text,) for text in counts.violations[:10])
        report.wrong(Violation("I10", "the resolver is right, for ever", rows))
