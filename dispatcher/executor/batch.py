"""A batch: groups of executables, applied in their order within one transaction, each group in a savepoint.

It ends early when its time is over, when something is left that only the transaction's end takes back, or when it would
have to wait for somebody else: what is done stays done, and the rest is the next batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from dispatcher.executor.accounting import finding_books, writing_books
from dispatcher.executor.fold import Contents, Refused, Taken, books_of, entered
from dispatcher.executor.function import Cancelled, Functions, calling, overrunning
from dispatcher.executor.guarded import OPERATIONS, applying_in_turn
from dispatcher.executor.guest import Host, checking, hurrying, putting_back
from dispatcher.executor.outcome import Done, Outcome, described, reason_of
from dispatcher.executor.target import Targets, finding_contents, writing_contents
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.sqlstate import is_held_up

LOOKS = 5  # at rows that others write at the same time
HIDDEN = (
    "its row is neither to be seen nor to be inserted: a trigger, a rule, row security, or others write it all along"
)
# What is not the first of its batch may wait, or be called, for so long, while others wait for what the batch has done.
# Then it is the first of the next one, with all the time there is.
HURRY_S = 0.25
GROWTH = 10  # of the number that is tried, as long as it goes well


@dataclass(slots=True)
class Batch:
    """What a batch acts on, and how far it is. `host` is None if no guest may come; `ours`: a session of our own.

    `is_over` tells that nothing more is to be begun; `seconds_left` until then.
    """

    schema: str
    targets: Targets
    functions: Functions
    host: Host | None
    ours: bool
    until: float
    monotonic: Callable[[], float]
    done: Done = field(default_factory=Done)
    is_over: bool = False
    size: int = 1  # how many guarded operations are tried in one trip: the first of a batch may have to wait

    def seconds_left(self) -> float:
        """Return how long more may be begun."""
        return self.until - self.monotonic()


def applying(batch: Batch, groups: list[list[Taken]]) -> Operation[Taken | None]:
    """Apply groups in their order, the first of them in any case; return the first executable that is left, if any."""
    left = groups[::-1]
    is_hurried = False
    while left:
        has_begun = batch.done.count > 0
        if has_begun and (batch.is_over or batch.seconds_left() <= 0):
            return left[-1][0]
        if has_begun and batch.ours and not is_hurried:
            batch.host = yield from hurrying(batch.host, HURRY_S)
            is_hurried = True
        group = left.pop()
        try:
            rest = yield from _applying(batch, group, left[-1] if left else [])
        except Exception as error:
            if has_begun and is_held_up(error):  # a deadlock, or somebody who holds a row for long
                return group[0]
            raise
        left += rest[::-1]
    return None


def _applying(batch: Batch, group: list[Taken], following: list[Taken]) -> Operation[list[list[Taken]]]:
    """Apply a group, or what can be of it; return what is left of it, in groups."""
    if group[0].operation == "call":
        yield from _calling(batch, group[0], following)
        return []
    target = batch.targets.get(group[0].target)
    if target is None or not target.guarded:
        is_done = yield from _writing(batch, group)
        middle = len(group) // 2
        return [] if is_done else [group[:middle], group[middle:]]
    size = min(batch.size, len(group))
    if size == 1:
        dead = len(batch.done.dead)
        yield from _writing(batch, group[:1])
        if len(batch.done.dead) == dead:
            batch.size = min(OPERATIONS, GROWTH * batch.size)
        return _filled(group[1:])
    count = yield from _taking_turns(batch, group[:size])
    if count == size:
        batch.size = min(OPERATIONS, GROWTH * size)
        return _filled(group[size:])
    batch.size = max(1, count)
    return _filled(group[count : count + 1], group[count + 1 :])


def _filled(*groups: list[Taken]) -> list[list[Taken]]:
    return [group for group in groups if group]


def _taking_turns(batch: Batch, group: list[Taken]) -> Operation[int]:
    """Apply operations on a guarded table in one trip; return how many of them, from the first on."""
    work = applying_in_turn(batch.schema, batch.targets[group[0].target], group, batch.seconds_left())
    try:
        done = yield from saved(work)
    except Exception as error:
        if reason_of(error) is None:
            raise
        return 0
    batch.done.add(done)
    return done.count


def _writing(batch: Batch, group: list[Taken]) -> Operation[bool]:
    """Apply executables, by one write for each key; false if the database refuses one of several: nothing is done."""
    reason: str | None = HIDDEN
    for _ in range(LOOKS):
        try:
            done = yield from saved(_written(batch, group))
        except _Changed:
            continue
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            break
        batch.done.add(done)
        return True
    if len(group) > 1:
        return False
    batch.done.add(_refused(group[0], str(reason)))
    return True


def _calling(batch: Batch, taken: Taken, following: list[Taken]) -> Operation[None]:
    """Call a function."""
    is_first = batch.done.count == 0 or not batch.ours
    try:
        done = yield from saved(_called(batch, taken, following, at_most_s=inf if is_first else HURRY_S))
    except Cancelled as cancelled:
        if not (yield from overrunning(cancelled)):
            raise cancelled.error from None
        done = _refused(taken, described(cancelled.error))
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        done = _refused(taken, reason)
    if done.dead:
        batch.is_over = True  # locks of the session outlive the savepoint
    batch.done.add(done)


def _refused(taken: Taken, reason: str) -> Done:
    done = Done(1)
    done.refuse(taken, reason)
    return done


# -- Within a savepoint -----------------------------------------------------------------------------------------------

SAVEPOINT = Sql("SAVEPOINT executable")
RELEASE = Sql("RELEASE SAVEPOINT executable")
ROLL_BACK = Sql("ROLLBACK TO SAVEPOINT executable")


class _Changed(Exception):
    """Somebody has written what we had looked at."""


def saved(work: Operation[T]) -> Operation[T]:
    """Do work that leaves nothing if it fails."""
    yield SAVEPOINT.at()()
    try:
        result = yield from work
    except Exception as error:
        # A lost connection has no savepoint to go back to.
        is_ours = isinstance(error, _Changed | Cancelled | Refused)
        if is_ours or is_held_up(error) or reason_of(error) is not None:
            yield ROLL_BACK.at()()
            yield RELEASE.at()()
        raise
    yield RELEASE.at()()
    return result


def _called(batch: Batch, taken: Taken, following: list[Taken], *, at_most_s: float) -> Operation[Done]:
    result = yield from calling(batch.functions[taken.target], taken.arguments, at_most_s=at_most_s)
    if batch.host is not None:
        batch.is_over = yield from putting_back(batch.schema, batch.host, following)
    return Done(1, outcomes=[Outcome.of_call(taken, result)] if taken.notify else [])


def _written(batch: Batch, group: list[Taken]) -> Operation[Done]:
    """Apply executables of which each can be applied with the others; raises `_Changed`."""
    schema, targets, done = batch.schema, batch.targets, Done(len(group))
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
        except Refused as refusal:
            done.refuse(each, str(refusal))
    before: dict[str, Contents] = {}
    for name, found in wanted.items():
        before[name] = yield from finding_contents(schema, targets[name], found)
    books = yield from finding_books(schema, {book for entries in accounted.values() for book in entries})
    after: dict[str, Contents] = {name: {} for name in before}  # what was refused writes nothing
    dropped: dict[str, set[str]] = {name: set() for name in before}
    for each in group:
        if each.operation == "account":
            try:
                entered(each, accounted[each.position], books)
            except Refused as refusal:
                done.refuse(each, str(refusal))
            else:
                if each.notify:
                    done.outcomes.append(Outcome(each, 200, {"outcome": "applied"}, "U"))
        elif (key := keys.get(each.position)) is not None:
            contents = after[each.target]
            held = contents.get(key, before[each.target][key])
            now, is_applied = done.apply(each, held, targets[each.target].rules)
            if is_applied:
                contents[key] = now
                if now is None:
                    dropped[each.target].add(key)
    for name, contents in after.items():
        if not (yield from writing_contents(schema, targets[name], before[name], contents, dropped[name])):
            raise _Changed
    yield from writing_books(schema, books)
    yield from checking(schema, batch.host)
    return done
