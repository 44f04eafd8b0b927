"""Execute: apply the oldest committed executables and remove them, in one transaction, as if one after another.

Each key is written once per batch. An executable that cannot be applied goes to `dead_letter`; the others go on.
Everything here runs inside one transaction, which `dispatcher.executor.batch_executor` begins and ends.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dispatcher.delivery.floor import FIRST, ScanStart
from dispatcher.executor.applying.apply import ApplyState, applying
from dispatcher.executor.applying.user_code import IMMEDIATE, reading_session
from dispatcher.executor.batch.fold import Taken
from dispatcher.executor.batch.take import Oldest, locking_executables, reading_oldest_executables, removing
from dispatcher.executor.execution import KEYED, Execution, are_guarded, ending, unknown
from dispatcher.executor.ranging import ranging
from dispatcher.executor.targets.function import reading_functions
from dispatcher.executor.targets.target import Targets, reading_targets
from mailroom.message.executable import STORE
from mailroom.sql.operation import Operation

# How long a batch may begin executables. Users' rows that it has written stay locked until it ends, and users wait for
# them. Long enough to make the fixed cost of a batch (some 5 ms) small.
# D-execute-2: A batch ends after 0.25 s, or where it would wait for others.
BOUND_S = 0.25


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
        execution = yield from ranging(schema, start, own_session=own_session)
    return replace(execution, drawn=oldest.drawn, running=oldest.running)


def _executing(
    schema: str, oldest: Oldest, own_session: bool, until: float, monotonic: Callable[[], float]
) -> Operation[Execution]:
    taken = oldest.taken
    targets = yield from reading_targets(schema, {each.target for each in taken if each.operation in KEYED})
    functions = yield from reading_functions(schema, {each.target for each in taken if each.operation == "call"})
    if functions or len(targets) > 1:
        yield IMMEDIATE.at()()
    session = (yield from reading_session(own_session=own_session)) if functions or are_guarded(targets) else None
    reasons = {each.position: unknown(each, targets, functions) for each in taken}
    known = [each for each in taken if reasons[each.position] is None]
    state = ApplyState(schema, targets, functions, session, own_session, until, monotonic)
    first_left = yield from applying(state, [*_groups(known, targets)])
    reached = [each for each in taken if first_left is None or each.position < first_left.position]
    for each in reached:
        if (reason := reasons[each.position]) is not None:
            state.results.refuse(each, reason)
    yield from removing(schema, reached, may_be_gone=session is not None)
    replies = yield from ending(schema, state.results)
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
