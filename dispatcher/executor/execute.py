"""Execute: apply the oldest committed executables and remove them, in one transaction, as if one after another.

Each key is written once per batch. An executable that cannot be applied goes to `dead_letter`; the others go on.
Everything here runs inside one transaction, which `dispatcher.executor.batch_executor` begins and ends.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dispatcher.executor.apply import ApplyState, applying, saved
from dispatcher.executor.dead import dead_lettering_executables, reason_of
from dispatcher.executor.delete_range import Step, deleting, deleting_progress, finding_progress, saving_progress
from dispatcher.executor.fold import OperationRefused, Taken
from dispatcher.executor.function import Functions, reading_functions
from dispatcher.executor.reply import Reply, sending_replies
from dispatcher.executor.results import Results
from dispatcher.executor.take import (
    Oldest,
    locking_executables,
    reading_next_executable,
    reading_oldest_executables,
    removing,
)
from dispatcher.executor.target import Targets, reading_targets
from dispatcher.executor.user_code import IMMEDIATE, checking, reading_session
from dispatcher.floor import FIRST, ScanStart
from mailroom.executable import STORE, VERSION
from mailroom.sql.operation import Operation

KEYED = ("put", "increment", "delete")
# How long a batch may begin executables. Users' rows that it has written stay locked until it ends, and users wait for
# them. Long enough to make the fixed cost of a batch (some 5 ms) small.
BOUND_S = 0.25


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


def executing(
    schema: str,
    *,
    start: ScanStart = FIRST,
    rows: int,
    max_bytes: int,
    own_session: bool = False,
    bound_s: float = BOUND_S,
    monotonic: Callable[[], float] = time.monotonic,
) -> Operation[Execution]:
    """Execute up to `rows` executables and `max_bytes` of values (at least one) from `start` on.

    After `bound_s` seconds by the clock `monotonic` nothing more is begun. `own_session`: the session is our own and
    may be reset.
    """
    until = monotonic() + bound_s
    yield from locking_executables(schema)
    oldest = yield from reading_oldest_executables(schema, start=start, rows=rows, max_bytes=max_bytes)
    if oldest.taken:
        execution = yield from _executing(schema, oldest, own_session, until, monotonic)
    else:
        execution = yield from _ranging(schema, start, own_session=own_session)
    return replace(execution, drawn=oldest.drawn, running=oldest.running)


def _executing(
    schema: str, oldest: Oldest, own_session: bool, until: float, monotonic: Callable[[], float]
) -> Operation[Execution]:
    taken = oldest.taken
    targets = yield from reading_targets(schema, {each.target for each in taken if each.operation in KEYED})
    functions = yield from reading_functions(schema, {each.target for each in taken if each.operation == "call"})
    if functions or len(targets) > 1:
        yield IMMEDIATE.at()()
    session = (yield from reading_session(own_session=own_session)) if functions or _are_guarded(targets) else None
    reasons = {each.position: _unknown(each, targets, functions) for each in taken}
    known = [each for each in taken if reasons[each.position] is None]
    state = ApplyState(schema, targets, functions, session, own_session, until, monotonic)
    first_left = yield from applying(state, [*_groups(known, targets)])
    reached = [each for each in taken if first_left is None or each.position < first_left.position]
    for each in reached:
        if (reason := reasons[each.position]) is not None:
            state.results.refuse(each, reason)
    yield from removing(schema, reached, may_be_gone=session is not None)
    replies = yield from _ending(schema, state.results)
    is_cut = len(reached) < len(taken)
    return Execution(
        len(reached),
        len(state.results.dead),
        replies,
        last=reached[-1].position,
        more=oldest.more or is_cut or session is not None,  # a function or trigger may have sent executables
        is_cut=is_cut,
        ran_user_code=session is not None,
    )


def _are_guarded(targets: Targets) -> bool:
    return any(target.guarded for target in targets.values())


def _unknown(taken: Taken, targets: Targets, functions: Functions) -> str | None:
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


def _groups(taken: Sequence[Taken], targets: Targets) -> Iterator[list[Taken]]:
    """Split executables into groups: those folded into one write per key, single calls, and runs on a guarded table.

    A delete of a key that its group has written begins a new group: the fold would skip that write, which the database
    may refuse, such as by a column's default.
    """
    group: list[Taken] = []
    kind: tuple[bool, str | None] = (False, None)
    written: set[tuple[str, str]] = set()
    for each in taken:
        target = targets[each.target] if each.operation in KEYED else None
        guarded = each.target if target is not None and target.guarded else None
        before, kind = kind, (each.operation == "call", guarded)
        key = (each.target, each.key if target is None else target.spelled(each.key))
        if group and (kind != before or kind[0] or (each.operation == "delete" and key in written)):
            yield group
            group, written = [], set()
        group.append(each)
        if target is not None and target.name != STORE and guarded is None and each.operation != "delete":
            written.add(key)
    if group:
        yield group


def _ending(schema: str, results: Results) -> Operation[int]:
    """Send dead letters and replies; return how many replies."""
    yield from dead_lettering_executables(schema, sorted(results.dead, key=lambda each: each[0].position))
    replies = sorted(results.replies, key=lambda reply: reply.taken.position)
    return (yield from sending_replies(schema, replies))


# -- Ranges -----------------------------------------------------------------------------------------------------------


def _ranging(schema: str, start: ScanStart, *, own_session: bool) -> Operation[Execution]:
    """Do one step of the range that comes next, if a range comes next."""
    taken = yield from reading_next_executable(schema, start)
    if taken is None or taken.version != VERSION or taken.operation != "delete_range":
        return Execution(0, more=taken is not None)  # it committed after the read that found nothing
    targets = yield from reading_targets(schema, {taken.target})
    progress = yield from finding_progress(schema, taken.position)
    before, results, step = progress.deleted, Results(), None
    reason = _unknown(taken, targets, {})
    session = (yield from reading_session(own_session=own_session)) if _are_guarded(targets) else None

    def checked() -> Operation[Step]:
        step = yield from deleting(schema, targets[taken.target], taken, progress)
        yield from checking(schema, session)
        return step

    if reason is None:
        try:
            step = yield from saved(checked())
        except OperationRefused as refusal:
            reason = str(refusal)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
    if step is None:
        results.refuse(taken, f"{reason}, after {before:,} keys were deleted" if before else str(reason))
    else:
        progress = step.progress
        if not step.is_done:
            yield from saving_progress(schema, taken.position, progress)
            return Execution(0, deleted=progress.deleted - before, more=True, ran_user_code=session is not None)
        details = {"outcome": "applied", "deleted": progress.deleted}
        results.replies.append(Reply(taken, 200, details, "D" if progress.deleted else None))
    yield from removing(schema, [taken])
    yield from deleting_progress(schema, taken.position)
    replies = yield from _ending(schema, results)
    deleted = progress.deleted - before
    return Execution(1, len(results.dead), replies, deleted, more=True, ran_user_code=session is not None)
