"""Execute: the oldest committed executables, applied and taken off in one transaction, as if one after another.

Operations on one key come to one write per batch. What cannot be applied goes to `dead_letter`, and the others go on.
What is here runs inside one transaction; `dispatcher.executor.executor` says where transactions begin and end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dispatcher.executor.batch import Batch, applying, saved
from dispatcher.executor.delete_range import Step, deleting, finding_progress, forgetting_progress, noting_progress
from dispatcher.executor.fold import Refused, Taken
from dispatcher.executor.function import Functions, reading_functions
from dispatcher.executor.guest import IMMEDIATE, checking, noting_settings
from dispatcher.executor.outcome import Done, Outcome, dead_lettering_executables, reason_of, telling
from dispatcher.executor.take import Look, locking_executables, looking_at_next, looking_at_oldest, removing
from dispatcher.executor.target import Targets, reading_targets
from dispatcher.floor import FIRST, Start
from mailroom.executable import STORE, VERSION
from mailroom.sql.operation import Operation

KEYED = ("put", "increment", "delete")
# How long a batch goes on beginning things: rows of users that it has written are locked until its end, and users wait
# for them as for each other. Long enough to make what each batch costs by itself (some 5 ms) small.
BOUND_S = 0.25


@dataclass(frozen=True, slots=True)
class Execution:
    """What one transaction did. `taken` counts executables, of which `dead` could not be applied; `told` messages.

    `last` is the largest position of a batch; a range has none, for what commits late may stand before it. `more`:
    there may be more to take. `is_cut`: others were looked at and left for the next batch. `deleted` counts keys of a
    range. `guest`: code of users ran, a function or a trigger. `drawn` and `running` are for the floor.
    """

    taken: int
    dead: int = 0
    told: int = 0
    deleted: int = 0
    last: int | None = None
    more: bool = False
    is_cut: bool = False
    guest: bool = False
    drawn: int = 0
    running: list[str] = field(default_factory=list)

    def rows(self, most: int) -> int:
        """Return how many executables the next batch is to look at: after one that was cut, twice what that did."""
        return min(most, max(1, 2 * self.taken)) if self.is_cut else most


def executing(
    schema: str,
    *,
    start: Start = FIRST,
    rows: int,
    max_bytes: int,
    ours: bool = False,
    bound_s: float = BOUND_S,
    monotonic: Callable[[], float] = time.monotonic,
) -> Operation[Execution]:
    """Execute up to `rows` executables and `max_bytes` of values (at least one) from `start` on.

    Nothing more is begun once `bound_s` seconds are over by `monotonic`, a clock. `ours` says that the session is our
    own and may be reset.
    """
    until = monotonic() + bound_s
    yield from locking_executables(schema)
    look = yield from looking_at_oldest(schema, start=start, rows=rows, max_bytes=max_bytes)
    if look.taken:
        execution = yield from _executing(schema, look, ours, until, monotonic)
    else:
        execution = yield from _ranging(schema, start, ours=ours)
    return replace(execution, drawn=look.drawn, running=look.running)


def _executing(
    schema: str, look: Look, ours: bool, until: float, monotonic: Callable[[], float]
) -> Operation[Execution]:
    taken = look.taken
    targets = yield from reading_targets(schema, {each.target for each in taken if each.operation in KEYED})
    functions = yield from reading_functions(schema, {each.target for each in taken if each.operation == "call"})
    if functions or len(targets) > 1:
        yield IMMEDIATE.at()()
    host = (yield from noting_settings(ours=ours)) if functions or _are_guarded(targets) else None
    reasons = {each.position: _unknown(each, targets, functions) for each in taken}
    known = [each for each in taken if reasons[each.position] is None]
    batch = Batch(schema, targets, functions, host, ours, until, monotonic)
    first_left = yield from applying(batch, [*_groups(known, targets)])
    reached = [each for each in taken if first_left is None or each.position < first_left.position]
    for each in reached:
        if (reason := reasons[each.position]) is not None:
            batch.done.refuse(each, reason)
    yield from removing(schema, reached, may_be_gone=host is not None)
    told = yield from _ending(schema, batch.done)
    is_cut = len(reached) < len(taken)
    return Execution(
        len(reached),
        len(batch.done.dead),
        told,
        last=reached[-1].position,
        more=look.more or is_cut or host is not None,  # a function, or a trigger, may have sent executables
        is_cut=is_cut,
        guest=host is not None,
    )


def _are_guarded(targets: Targets) -> bool:
    return any(target.guarded for target in targets.values())


def _unknown(taken: Taken, targets: Targets, functions: Functions) -> str | None:
    """Return why one cannot even be tried."""
    if taken.fault is not None:
        return f"it is no executable (outbox_executable_{taken.fault}), and was inserted past the trigger that says so"
    if taken.version != VERSION:
        return f"version {taken.version} of the format is not known to this release: upgrade it, and requeue this"
    if (taken.operation in KEYED or taken.operation == "delete_range") and taken.target not in targets:
        return "its target is not registered, or its table has changed: mailroom executor target add, and requeue this"
    if taken.operation == "call" and taken.target not in functions:
        return "its function is not registered, or is gone: mailroom executor function add, and requeue this"
    return None


def _groups(taken: Sequence[Taken], targets: Targets) -> Iterator[list[Taken]]:
    """Cut executables into those that come to one write, calls, and those that one guarded table must see one by one.

    What is written is not hidden by a delete behind it: one by one it may be refused, by the default of a column say.
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


def _ending(schema: str, done: Done) -> Operation[int]:
    """Put away what could not be applied, and tell who wants to know; returns how many messages that took."""
    yield from dead_lettering_executables(schema, sorted(done.dead, key=lambda each: each[0].position))
    outcomes = sorted(done.outcomes, key=lambda outcome: outcome.taken.position)
    return (yield from telling(schema, outcomes))


# -- Ranges -----------------------------------------------------------------------------------------------------------


def _ranging(schema: str, start: Start, *, ours: bool) -> Operation[Execution]:
    """Delete what one transaction may of the range that comes next, if a range is what comes next."""
    taken = yield from looking_at_next(schema, start)
    if taken is None or taken.version != VERSION or taken.operation != "delete_range":
        return Execution(0, more=taken is not None)  # it came after the look that found nothing
    targets = yield from reading_targets(schema, {taken.target})
    progress = yield from finding_progress(schema, taken.position)
    before, done, step = progress.deleted, Done(), None
    reason = _unknown(taken, targets, {})
    host = (yield from noting_settings(ours=ours)) if _are_guarded(targets) else None

    def checked() -> Operation[Step]:
        step = yield from deleting(schema, targets[taken.target], taken, progress)
        yield from checking(schema, host)
        return step

    if reason is None:
        try:
            step = yield from saved(checked())
        except Refused as refusal:
            reason = str(refusal)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
    if step is None:
        done.refuse(taken, f"{reason}, after {before:,} keys were deleted" if before else str(reason))
    else:
        progress = step.progress
        if not step.is_done:
            yield from noting_progress(schema, taken.position, progress)
            return Execution(0, deleted=progress.deleted - before, more=True, guest=host is not None)
        details = {"outcome": "applied", "deleted": progress.deleted}
        done.outcomes.append(Outcome(taken, 200, details, "D" if progress.deleted else None))
    yield from removing(schema, [taken])
    yield from forgetting_progress(schema, taken.position)
    told = yield from _ending(schema, done)
    return Execution(1, len(done.dead), told, progress.deleted - before, more=True, guest=host is not None)
