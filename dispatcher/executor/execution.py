"""What one transaction of the executor did, and what a batch and a step of a range have in common."""

from dataclasses import dataclass, field

from dispatcher.executor.batch.dead import dead_lettering_executables
from dispatcher.executor.batch.fold import Taken
from dispatcher.executor.batch.reply import sending_replies
from dispatcher.executor.batch.results import Results
from dispatcher.executor.targets.function import Functions
from dispatcher.executor.targets.target import Targets
from mailroom.message.executable import VERSION
from mailroom.sql.operation import Operation

KEYED = ("put", "increment", "delete")


@dataclass(frozen=True, slots=True)
class Execution:
    """What one transaction did: took `taken` executables, of which `dead` could not be applied; sent `replied` replies.

    `last` is the largest position of a batch; a range has none, since lower positions may still commit. `more`: there
    may be more to take. `is_cut`: some that were read are left for the next batch. `deleted` counts a range's keys.
    `ran_user_code`: a function or trigger may have run. `drawn` and `running` are for the floor.
    """

    taken: int
    dead: int = 0
    replied: int = 0
    deleted: int = 0
    last: int | None = None
    more: bool = False
    is_cut: bool = False
    ran_user_code: bool = False
    drawn: int = 0
    running: list[str] = field(default_factory=list)

    def rows(self, most: int) -> int:
        """Return how many executables the next batch reads: after a cut batch, twice as many as that applied."""
        return min(most, max(1, 2 * self.taken)) if self.is_cut else most


def are_guarded(targets: Targets) -> bool:
    """Return whether users' code may run when one of these targets is written."""
    return any(target.guarded for target in targets.values())


def unknown(taken: Taken, targets: Targets, functions: Functions) -> str | None:
    """Return why an executable cannot even be tried; None if it can."""
    if taken.fault is not None:
        return f"it is not valid (outbox_executable_{taken.fault}), and was inserted past the trigger that checks it"
    if taken.version != VERSION:
        return f"this release does not know version {taken.version} of the format: upgrade, then requeue this"
    if (taken.operation in KEYED or taken.operation == "delete_range") and taken.target not in targets:
        return "its target is not registered, or its table has changed: mailroom executor target add, then requeue this"
    if taken.operation == "call" and taken.target not in functions:
        return "its function is not registered, or is gone: mailroom executor function add, then requeue this"
    return None


def ending(schema: str, results: Results) -> Operation[int]:
    """Send dead letters and replies; return how many replies."""
    yield from dead_lettering_executables(schema, sorted(results.dead, key=lambda each: each[0].position))
    replies = sorted(results.replies, key=lambda reply: reply.taken.position)
    return (yield from sending_replies(schema, replies))
