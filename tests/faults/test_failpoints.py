"""The failpoints: what can be struck is named after the product's code, and struck where it says."""

import asyncio
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.delivery import deliver
from dispatcher.lanes import lease
from inbox.by_key import claim
from inbox.worker import worker
from mailroom.session import listener
from tests.faults import awaits, matrix
from tests.faults.failpoints import names_of_statements
from tests.faults.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


def test_statements_are_named_after_their_constants() -> None:
    names = names_of_statements()
    assert names[id(deliver.DELIVER)] == "dispatcher.delivery.deliver.DELIVER"
    assert names[id(lease.TAKE)] == "dispatcher.lanes.lease.TAKE"
    assert names[id(claim.REAP_ANY)] == "inbox.by_key.claim.REAP_ANY"
    assert names[id(lease.TERMINATE[0])] == matrix.TAKING_OVER
    assert names[id(lease.GIVE_UP)] == matrix.GIVING_UP


def test_every_await_of_the_loops_is_in_the_catalogue() -> None:
    names = [each.name for each in awaits.catalogue()]
    assert len(names) == len(set(names))
    for function in (listener.Listener.run, worker.AsyncWorker._work, worker._Worker._serve):
        assert f"await {function.__module__}.{function.__qualname__} #1" in names


async def test_a_suspended_task_is_found_at_its_await() -> None:
    stood: list[str] = []
    task = asyncio.ensure_future(_drive(listener.heard(asyncio.Event(), 0.01), stood))
    await task
    assert "await mailroom.session.listener.heard #1" in stood


async def _drive(coroutine: Any, stood: list[str]) -> Any:
    def suspended(at: Any) -> None:
        stood.extend(awaits.standing_at(at))

    return await awaits.Driven(coroutine, suspended)


async def test_a_driven_coroutine_gives_its_result_and_takes_what_is_thrown() -> None:
    class Pause:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def work() -> str:
        try:
            await Pause()
        except ZeroDivisionError:
            return "thrown"
        return "done"

    assert await awaits.Driven(work(), lambda at: None) == "done"
    assert await awaits.Driven(work(), lambda at: ZeroDivisionError()) == "thrown"


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_still_applies(name: str) -> None:
    program = "import sys; from tests.faults import mutants; mutants.apply(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
