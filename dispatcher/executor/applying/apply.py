"""Apply a batch of executables: groups, in order, within one transaction, each group in a savepoint.

A batch ends early when its time is over, when user code leaves something that only the end of the transaction undoes,
or when it would have to wait for another session. What is applied by then is committed; the rest is the next batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from dispatcher.executor.applying.guarded import OPERATIONS, applying_in_turn
from dispatcher.executor.applying.user_code import SessionState, checking, limiting_lock_wait, restoring
from dispatcher.executor.batch.accounting import finding_books, writing_books
from dispatcher.executor.batch.dead import described, reason_of
from dispatcher.executor.batch.fold import Contents, OperationRefused, Taken, books_of, entered
from dispatcher.executor.batch.reply import Reply
from dispatcher.executor.batch.results import Results
from dispatcher.executor.targets.function import Cancelled, Functions, calling, overrunning
from dispatcher.executor.targets.target import Targets, finding_contents, writing_contents
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.sqlstate import is_held_up

READS = 5  # attempts to read and write rows that others write at the same time
HIDDEN = (
    "its row can be neither read nor inserted: because of a trigger, a rule or row security, or because others keep "
    "writing it"
)
# Others wait for the rows that a batch has written. So an executable that is not the first of its batch may wait for
# a lock, or run a call, for this long only; then it becomes the first of the next batch, without this limit.
# D-execute-5: A cancelled statement is tried again.
LATER_WAIT_S = 0.25
GROWTH = 10  # factor by which the number of operations per trip grows after a success


@dataclass(slots=True)
class ApplyState:
    """What a batch acts on, and how far it is.

    `session` is None if no user code can run. `own_session`: the session is our own. `is_over`: begin nothing more.
    """

    schema: str
    targets: Targets
    functions: Functions
    session: SessionState | None
    own_session: bool
    until: float
    monotonic: Callable[[], float]
    results: Results = field(default_factory=Results)
    is_over: bool = False
    size: int = 1  # guarded operations per trip to the server; starts at 1, since the first may have to wait

    def seconds_left(self) -> float:
        """Return for how many seconds more executables may be begun."""
        return self.until - self.monotonic()


def applying(state: ApplyState, groups: list[list[Taken]]) -> Operation[Taken | None]:
    """Apply groups in order, always the first one; return the first executable that is left, or None."""
    left = groups[::-1]
    is_limited = False
    while left:
        has_begun = state.results.count > 0
        if has_begun and (state.is_over or state.seconds_left() <= 0):
            return left[-1][0]
        if has_begun and state.own_session and not is_limited:
            state.session = yield from limiting_lock_wait(state.session, LATER_WAIT_S)
            is_limited = True
        group = left.pop()
        try:
            rest = yield from _applying(state, group, left[-1] if left else [])
        except Exception as error:
            if has_begun and is_held_up(error):  # a deadlock, or a row that another session holds for long
                return group[0]
            raise
        left += rest[::-1]
    return None


def _applying(state: ApplyState, group: list[Taken], following: list[Taken]) -> Operation[list[list[Taken]]]:
    """Apply a group, or a part of it; return the rest, in groups."""
    if group[0].operation == "call":
        yield from _calling(state, group[0], following)
        return []
    target = state.targets.get(group[0].target)
    if target is None or not target.guarded:
        is_done = yield from _writing(state, group)
        middle = len(group) // 2
        return [] if is_done else [group[:middle], group[middle:]]
    size = min(state.size, len(group))
    if size == 1:
        dead = len(state.results.dead)
        yield from _writing(state, group[:1])
        if len(state.results.dead) == dead:
            state.size = min(OPERATIONS, GROWTH * state.size)
        return _filled(group[1:])
    count = yield from _taking_turns(state, group[:size])
    if count == size:
        state.size = min(OPERATIONS, GROWTH * size)
        return _filled(group[size:])
    state.size = max(1, count)
    return _filled(group[count : count + 1], group[count + 1 :])


def _filled(*groups: list[Taken]) -> list[list[Taken]]:
    return [group for group in groups if group]


def _taking_turns(state: ApplyState, group: list[Taken]) -> Operation[int]:
    """Apply operations on a guarded table in one trip; return how many of them, counted from the first."""
    work = applying_in_turn(state.schema, state.targets[group[0].target], group, state.seconds_left())
    try:
        results = yield from saved(work)
    except Exception as error:
        if reason_of(error) is None:
            raise
        return 0
    state.results.add(results)
    return results.count


def _writing(state: ApplyState, group: list[Taken]) -> Operation[bool]:
    """Write each key once. Return false, with nothing written, if the database refuses one of several executables."""
    reason: str | None = HIDDEN
    for _ in range(READS):
        try:
            results = yield from saved(_written(state, group))
        except _Changed:
            continue
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            break
        state.results.add(results)
        return True
    if len(group) > 1:
        return False
    state.results.add(_refused(group[0], str(reason)))
    return True


def _calling(state: ApplyState, taken: Taken, following: list[Taken]) -> Operation[None]:
    """Call a function, and record its result or its refusal."""
    is_first = state.results.count == 0 or not state.own_session
    try:
        results = yield from saved(_called(state, taken, following, at_most_s=inf if is_first else LATER_WAIT_S))
    except Cancelled as cancelled:
        if not (yield from overrunning(cancelled)):
            raise cancelled.error from None
        results = _refused(taken, described(cancelled.error))
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        results = _refused(taken, reason)
    if results.dead:
        state.is_over = True  # session locks outlive the savepoint
    state.results.add(results)


def _refused(taken: Taken, reason: str) -> Results:
    results = Results(1)
    results.refuse(taken, reason)
    return results


# -- Within a savepoint -----------------------------------------------------------------------------------------------

SAVEPOINT = Sql("SAVEPOINT executable")
RELEASE = Sql("RELEASE SAVEPOINT executable")
ROLL_BACK = Sql("ROLLBACK TO SAVEPOINT executable")


class _Changed(Exception):
    """Another session wrote a row after we had read it."""


def saved(work: Operation[T]) -> Operation[T]:
    """Do work in a savepoint, so that it leaves nothing if it fails."""
    yield SAVEPOINT.at()()
    try:
        result = yield from work
    except Exception as error:
        # On a lost connection there is no savepoint to roll back to.
        is_ours = isinstance(error, _Changed | Cancelled | OperationRefused)
        if is_ours or is_held_up(error) or reason_of(error) is not None:
            yield ROLL_BACK.at()()
            yield RELEASE.at()()
        raise
    yield RELEASE.at()()
    return result


def _called(state: ApplyState, taken: Taken, following: list[Taken], *, at_most_s: float) -> Operation[Results]:
    result = yield from calling(state.functions[taken.target], taken.arguments, at_most_s=at_most_s)
    if state.session is not None:
        state.is_over = yield from restoring(state.schema, state.session, following)
    return Results(1, replies=[Reply.of_call(taken, result)] if taken.notify else [])


def _written(state: ApplyState, group: list[Taken]) -> Operation[Results]:
    """Fold executables and write each key once. Raises `_Changed`."""
    schema, targets, results = state.schema, state.targets, Results(len(group))
    keys: dict[int, str] = {}  # by position
    wanted: dict[str, list[str]] = {}
    accounted = {}
    for each in group:
        if each.operation == "account":
            accounted[each.position] = books_of(each)
            continue
        try:
            keys[each.position] = targets[each.target].key_of(each.key)
            wanted.setdefault(each.target, []).append(keys[each.position])
        except OperationRefused as refusal:
            results.refuse(each, str(refusal))
    before: dict[str, Contents] = {}
    for name, found in wanted.items():
        before[name] = yield from finding_contents(schema, targets[name], found)
    books = yield from finding_books(schema, {book for entries in accounted.values() for book in entries})
    after: dict[str, Contents] = {name: {} for name in before}  # a refused operation writes nothing
    dropped: dict[str, set[str]] = {name: set() for name in before}
    for each in group:
        if each.operation == "account":
            try:
                entered(each, accounted[each.position], books)
            except OperationRefused as refusal:
                results.refuse(each, str(refusal))
            else:
                if each.notify:
                    results.replies.append(Reply(each, 200, {"outcome": "applied"}, "U"))
        elif (key := keys.get(each.position)) is not None:
            contents = after[each.target]
            held = contents.get(key, before[each.target][key])
            now, is_applied = results.apply(each, held, targets[each.target].rules)
            if is_applied:
                contents[key] = now
                if now is None:
                    dropped[each.target].add(key)
    for name, contents in after.items():
        if not (yield from writing_contents(schema, targets[name], before[name], contents, dropped[name])):
            raise _Changed
    yield from writing_books(schema, books)
    yield from checking(schema, state.session)
    return results
