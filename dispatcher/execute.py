"""Execute: the oldest committed executables, taken and applied in one transaction, as if one after another.

Operations on one key come to one write per batch. What cannot be applied goes to `dead_letter`, and the others go on.
What is here runs inside one transaction; `dispatcher.applier` says where transactions begin and end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dispatcher.accounts import finding_books, writing_books
from dispatcher.fold import CompareFailed, Contents, Refused, Taken, applied, books_of, entered
from dispatcher.function import Cancelled, Functions, calling, overrunning, reading_functions
from dispatcher.guest import Host, noting_settings, putting_back_settings
from dispatcher.outcome import Outcome, burying_executables, described, reason_of, telling
from dispatcher.range import deleting, finding_progress, forgetting_progress, noting_progress
from dispatcher.taking import locking_executables, looking_at_next, removing, taking
from dispatcher.target import Targets, finding_contents, reading_targets, writing_contents
from mailroom.executable import STORE, VERSION
from mailroom.operation import Operation, Sql, T

KEYED = ("put", "increment", "delete")


@dataclass(frozen=True, slots=True)
class Execution:
    """What one transaction did. `taken` counts executables, of which `dead` could not be applied; `told` messages.

    `last` is the largest position of a batch; a range has none, for what commits late may stand before it. `more`:
    there may be more to take. `deleted` counts keys of a range. `guest`: code of users ran, a function or a trigger.
    """

    taken: int
    dead: int = 0
    told: int = 0
    deleted: int = 0
    last: int | None = None
    more: bool = False
    guest: bool = False
    drawn: int = 0
    running: None = None


@dataclass(slots=True)
class Done:
    """What applying executables came to."""

    dead: list[tuple[Taken, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def refuse(self, taken: Taken, reason: str) -> None:
        """Note that one cannot be applied."""
        self.dead.append((taken, reason))
        if taken.fault is None:  # else there may be no topic that could be told
            self.outcomes.append(Outcome(taken, 500, {"outcome": "refused", "reason": reason}))

    def add(self, other: "Done") -> None:
        """Take what else was done."""
        self.dead += other.dead
        self.outcomes += other.outcomes


def executing(schema: str, *, floor: int, rows: int, max_bytes: int) -> Operation[Execution]:
    """Execute up to `rows` executables and `max_bytes` of values (at least one) above the position `floor`."""
    yield from locking_executables(schema)
    taken, more = yield from taking(schema, floor=floor, rows=rows, max_bytes=max_bytes)
    if not taken:
        return (yield from _ranging(schema, floor))
    done, known = Done(), []
    targets = yield from reading_targets(schema, {each.target for each in taken if each.operation in KEYED})
    functions = yield from reading_functions(schema, {each.target for each in taken if each.operation == "call"})
    if functions or len(targets) > 1:
        yield IMMEDIATE.at()()
    host = (yield from noting_settings()) if functions or _are_guarded(targets) else None
    for each in taken:
        reason = _unknown(each, targets, functions)
        known.append(each) if reason is None else done.refuse(each, reason)
    for group in _groups(known, targets):
        done.add((yield from _applying(schema, group, targets, functions, host)))
    told = yield from _ending(schema, done)
    # A function, or a trigger, may have sent executables.
    more = more or host is not None
    return Execution(len(taken), len(done.dead), told, 0, taken[-1].position, more, guest=host is not None)


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
    """Cut executables into those that come to one write, and those that must be applied alone.

    What is written is not hidden by a delete behind it: one by one it may be refused, by the default of a column say.
    """
    group: list[Taken] = []
    written: set[tuple[str, str]] = set()
    for each in taken:
        target = targets[each.target] if each.operation in KEYED else None
        key = (each.target, each.key if target is None else target.spelled(each.key))
        is_alone = target is not None and target.guarded
        if group and (is_alone or (each.operation == "delete" and key in written)):
            yield group
            group, written = [], set()
        group.append(each)
        if is_alone:
            yield group
            group = []
        elif target is not None and target.name != STORE and each.operation != "delete":
            written.add(key)
    if group:
        yield group


def _ending(schema: str, done: Done) -> Operation[int]:
    """Put away what could not be applied, and tell who wants to know; returns how many messages that took."""
    yield from burying_executables(schema, sorted(done.dead, key=lambda each: each[0].position))
    outcomes = sorted(done.outcomes, key=lambda outcome: outcome.taken.position)
    return (yield from telling(schema, outcomes))


# -- Within a savepoint -----------------------------------------------------------------------------------------------

SAVEPOINT = Sql("SAVEPOINT executable")
RELEASE = Sql("RELEASE SAVEPOINT executable")
ROLL_BACK = Sql("ROLLBACK TO SAVEPOINT executable")
# Constraints that are deferred would fail the COMMIT, and with it all the others of the batch. At its beginning, so
# that each executable finds them alike; and after each, which may have deferred them again.
IMMEDIATE = Sql("SET CONSTRAINTS ALL IMMEDIATE")

LOOKS = 5  # at rows that others write at the same time
HIDDEN = (
    "its row is neither to be seen nor to be inserted: a trigger, a rule, row security, or others write it all along"
)


class _Changed(Exception):
    """Somebody has written what we had looked at."""


def _applying(
    schema: str, group: list[Taken], targets: Targets, functions: Functions, host: Host | None
) -> Operation[Done]:
    """Apply executables; one that the database refuses is found by halving, and the others are applied."""
    reason: str | None = HIDDEN
    is_call = group[0].operation == "call"
    for _ in range(LOOKS):
        try:
            work = _call(group[0], functions) if is_call else _fold(schema, group, targets)
            return (yield from _saved(work, host, is_call=is_call))
        except _Changed:
            continue
        except Cancelled as cancelled:
            if not (yield from overrunning(cancelled)):
                raise cancelled.error from None
            reason = described(cancelled.error)
            break
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            break
    done = Done()
    if len(group) == 1:
        done.refuse(group[0], str(reason))
        return done
    for half in (group[: len(group) // 2], group[len(group) // 2 :]):
        done.add((yield from _applying(schema, half, targets, functions, host)))
    return done


def _saved(work: Operation[T], host: Host | None, *, is_call: bool = False) -> Operation[T]:
    """Do work that leaves nothing if it fails, and no setting to the next if guests may have come: then to `host`."""
    yield SAVEPOINT.at()()
    try:
        result = yield from work
        yield IMMEDIATE.at()()
        if host is not None:
            yield from putting_back_settings(host, after_call=is_call)
    except Exception as error:
        # A lost connection has no savepoint to go back to.
        if isinstance(error, _Changed | Cancelled | Refused) or reason_of(error) is not None:
            yield ROLL_BACK.at()()
            yield RELEASE.at()()
        raise
    yield RELEASE.at()()
    return result


def _call(taken: Taken, functions: Functions) -> Operation[Done]:
    result = yield from calling(functions[taken.target], taken.arguments)
    return Done(outcomes=[Outcome.of_call(taken, result)] if taken.notify else [])


def _fold(schema: str, group: list[Taken], targets: Targets) -> Operation[Done]:
    """Apply executables of which each can be applied with the others; raises `_Changed`."""
    done = Done()
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
    after = {name: contents.copy() for name, contents in before.items()}
    dropped: dict[str, set[str]] = {name: set() for name in before}
    for each in group:
        try:
            if each.operation == "account":
                entered(each, accounted[each.position], books)
                if each.notify:
                    done.outcomes.append(Outcome(each, 200, {"outcome": "applied"}, "U"))
            elif (key := keys.get(each.position)) is not None:
                contents = after[each.target]
                held = contents[key]
                contents[key] = now = applied(each, held, targets[each.target].rules)
                if now is None:
                    dropped[each.target].add(key)
                if each.notify:
                    done.outcomes.append(Outcome.of(each, held, now))
        except CompareFailed as failed:
            if each.notify is None:
                done.refuse(each, str(failed))
            else:
                done.outcomes.append(Outcome(each, 409, {"outcome": "compare failed", "found": failed.found}))
        except Refused as refusal:
            done.refuse(each, str(refusal))
    for name, contents in after.items():
        if not (yield from writing_contents(schema, targets[name], before[name], contents, dropped[name])):
            raise _Changed
    yield from writing_books(schema, books)
    return done


# -- Ranges -----------------------------------------------------------------------------------------------------------


def _ranging(schema: str, floor: int) -> Operation[Execution]:
    """Delete what one transaction may of the range that comes next, if a range is what comes next."""
    taken = yield from looking_at_next(schema, floor)
    if taken is None or taken.version != VERSION or taken.operation != "delete_range":
        return Execution(0, more=taken is not None)  # it came after the look that found nothing
    targets = yield from reading_targets(schema, {taken.target})
    progress = yield from finding_progress(schema, taken.position)
    before, done, step = progress.deleted, Done(), None
    reason = _unknown(taken, targets, {})
    host = (yield from noting_settings()) if _are_guarded(targets) else None
    if reason is None:
        try:
            step = yield from _saved(deleting(schema, targets[taken.target], taken, progress), host)
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
    yield from removing(schema, taken.position)
    yield from forgetting_progress(schema, taken.position)
    told = yield from _ending(schema, done)
    return Execution(1, len(done.dead), told, progress.deleted - before, more=True, guest=host is not None)
