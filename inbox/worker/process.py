"""Run several workers, sync and async, in one process until a signal comes or one of them ends."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from inbox.worker.signals import stopping
from inbox.worker.worker import AsyncWorker, Worker


def serve(workers: Sequence[Worker | AsyncWorker]) -> None:
    """Run workers until SIGTERM or SIGINT, then let all finish their batches; if one ends, stop all, raise its error.

    Async workers share one event loop, so they may also share objects bound to it, such as an engine.
    """

    def stop() -> None:
        for each in workers:
            each.stop()

    with stopping(stop, owned=True), ThreadPoolExecutor(len(workers), "mailroom-worker") as threads:
        asyncio.run(_until_one_ends(workers, threads, stop))


async def _until_one_ends(
    workers: Sequence[Worker | AsyncWorker], threads: ThreadPoolExecutor, stop: Callable[[], None]
) -> None:
    tasks = [asyncio.create_task(_ending(each, threads)) for each in workers]
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stop()
    await asyncio.wait(tasks)
    for task in (*ended, *tasks):
        if (error := task.result()) is not None:
            raise error


async def _ending(worker: Worker | AsyncWorker, threads: ThreadPoolExecutor) -> BaseException | None:
    """Run a worker and return its exception; SystemExit raised in a task would end the event loop and the others."""
    try:
        if isinstance(worker, AsyncWorker):
            await worker.run()
        else:
            await asyncio.get_running_loop().run_in_executor(threads, worker.run)
    except BaseException as error:
        return error
    return None
