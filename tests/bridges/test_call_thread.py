"""Blocking calls have a thread; one that never returns holds up neither who waits for it nor the end of the process."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import pytest

from dispatcher.bridges.kafka import call_thread
from dispatcher.bridges.kafka.call_thread import CallThread, Hung
from tests.support.waiting import WITHIN_S, eventually


@pytest.fixture
def returns() -> Iterator[threading.Event]:
    """Lets the calls that hang return; set at the end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_thread, "HUNG_S", 0.05)
    monkeypatch.setattr(call_thread, "LOOK_S", 0.01)


async def test_calls_are_made_in_turn_and_return_or_raise() -> None:
    thread, made = CallThread("calls"), list[int]()

    def call(nth: int) -> int:
        made.append(nth)
        return nth

    def fail() -> None:
        raise ValueError("no")

    assert await asyncio.gather(*(thread.call(lambda nth=nth: call(nth)) for nth in range(20))) == list(range(20))  # type: ignore[misc]  # bound at once
    assert made == list(range(20))
    with pytest.raises(ValueError, match="no"):
        await thread.call(fail)
    thread.end()
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "calls"])


@pytest.mark.usefixtures("quick")
async def test_call_that_never_returns_is_left_behind_and_those_after_it_too(returns: threading.Event) -> None:
    thread = CallThread("hung")
    with pytest.raises(Hung):
        await thread.call(returns.wait)
    with pytest.raises(Hung):
        await thread.call(lambda: None)
    thread.end()
    returns.set()  # it does return: nobody waits for it any more, and its thread ends
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "hung"])


@pytest.mark.usefixtures("quick")
async def test_call_that_says_that_it_goes_on_may_take_long(
    returns: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, looks, wait = CallThread("long"), list[float](), asyncio.wait

    async def look(waiting: Iterable[asyncio.Future[bool]], timeout: float) -> None:  # noqa: ASYNC109 - as it is called
        looks.append(timeout)
        thread.seen()  # between two looks
        if len(looks) == 40:
            returns.set()
        await wait(waiting, timeout=timeout)

    monkeypatch.setattr("asyncio.wait", look)
    assert await thread.call(returns.wait)
    assert len(looks) >= 40
    thread.end()


async def test_result_of_who_no_longer_waits_is_dropped_and_the_next_call_is_made(returns: threading.Event) -> None:
    thread = CallThread("asked")
    began = threading.Event()

    def call() -> None:
        began.set()
        returns.wait()

    asking = asyncio.create_task(thread.call(call))
    await asyncio.to_thread(began.wait, WITHIN_S)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    returns.set()
    assert await thread.call(lambda: 1) == 1
    thread.end()


ENDS = """
import asyncio, threading
from dispatcher.bridges.kafka.call_thread import CallThread

async def main():
    asyncio.create_task(CallThread("hung").call(threading.Event().wait))
    await asyncio.sleep(0)

asyncio.run(main())
"""


def test_process_ends_though_a_call_never_returns() -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=WITHIN_S)
