"""A daemon of a bridged node: all lanes as the product runs them, whose calls of Kafka's client are failpoints too."""

import asyncio
from collections.abc import Callable
from typing import Any

from dispatcher.bridges import publishing, tending
from dispatcher.bridges.kafka import publisher, source
from dispatcher.daemon import all_lanes, run_until_signalled
from tests.faults.bridges import mutants
from tests.faults.role import Control
from tests.faults.role_linked import shorten_links
from tests.faults.task import Task

ROWS = 300  # so that there are many batches
RECORDS = "kafka records"  # passed behind a read that has found some
PRODUCE = "kafka produce"  # with the topic behind it
BATCH = "kafka batch"  # the same for the first record of a batch
# By name: in which module the client is made, and by which class.
CALLS = {
    "Producer": (
        publisher,
        ("init_transactions", "produce", "poll", "send_offsets_to_transaction", "commit_transaction"),
    ),
    "Consumer": (source, ("consume", "commit")),
}


def play(task: Task, control: Control) -> None:
    """Deliver, publish and take in until told to stop."""
    shorten_links(task)
    for module, name, value in (
        (publishing, "ROWS", ROWS),
        (source, "ROWS", ROWS),
        (tending, "LEASE_S", task.habits.lease_s),
    ):
        setattr(module, name, value)
    if task.habits.bridge_mutant:
        mutants.apply(task.habits.bridge_mutant)
    for name, (module, calls) in CALLS.items():
        setattr(module, name, _passing(getattr(module, name), calls, control))
    asyncio.run(run_until_signalled(all_lanes(task.dsn, poll_interval_s=task.habits.poll_s)))


def _passing(client: type, calls: tuple[str, ...], control: Control) -> type:
    """Return the client with failpoints before and after these calls."""
    return type(client.__name__, (client,), {call: _wrapped(getattr(client, call), call, control) for call in calls})


def _wrapped(method: Callable[..., Any], call: str, control: Control) -> Callable[..., Any]:
    def passed(*arguments: Any, **options: Any) -> Any:
        client, place = arguments[0], f"kafka {call}"
        if call == "produce":
            place = f"{PRODUCE} {arguments[1]}"
            if not getattr(client, "is_handing_over", False):
                control.at_call(f"{BATCH} {arguments[1]}", "before")
        client.is_handing_over = call == "produce"
        control.at_call(place, "before")
        result = method(*arguments, **options)
        control.at_call(place, "after")
        if call == "consume" and result:
            control.at_call(RECORDS, "after")
        return result

    return passed
