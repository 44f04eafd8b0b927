"""A step of a range of keys that are deleted: one transaction, which takes nothing else."""

from dispatcher.delivery.floor import ScanStart
from dispatcher.executor.applying.apply import saved
from dispatcher.executor.applying.delete_range import (
    Progress,
    Step,
    deleting,
    deleting_progress,
    finding_progress,
    saving_progress,
)
from dispatcher.executor.applying.user_code import SessionState, checking, reading_session
from dispatcher.executor.batch.dead import reason_of
from dispatcher.executor.batch.fold import OperationRefused, Taken
from dispatcher.executor.batch.reply import Reply
from dispatcher.executor.batch.results import Results
from dispatcher.executor.batch.take import reading_next_executable, removing
from dispatcher.executor.execution import Execution, are_guarded, ending, unknown
from dispatcher.executor.targets.target import Target, reading_targets
from mailroom.message.executable import VERSION
from mailroom.sql.operation import Operation


def ranging(schema: str, start: ScanStart, *, own_session: bool) -> Operation[Execution]:
    """Do one step of the range that comes next, if a range comes next."""
    taken = yield from reading_next_executable(schema, start)
    if taken is None or taken.version != VERSION or taken.operation != "delete_range":
        return Execution(0, more=taken is not None)  # it committed after the read that found nothing
    targets = yield from reading_targets(schema, {taken.target})
    before = yield from finding_progress(schema, taken.position)
    found: Step | str | None = unknown(taken, targets, {})
    session = (yield from reading_session(own_session=own_session)) if are_guarded(targets) else None
    ran_user_code = session is not None
    if found is None:
        found = yield from _stepping(schema, targets[taken.target], taken, before, session)
    if isinstance(found, Step) and not found.is_done:
        yield from saving_progress(schema, taken.position, found.progress)
        deleted = found.progress.deleted - before.deleted
        return Execution(0, deleted=deleted, more=True, ran_user_code=ran_user_code)
    results = _results(taken, before, found)
    yield from removing(schema, [taken])
    yield from deleting_progress(schema, taken.position)
    replies = yield from ending(schema, results)
    deleted = found.progress.deleted - before.deleted if isinstance(found, Step) else 0
    return Execution(1, len(results.dead), replies, deleted, more=True, ran_user_code=ran_user_code)


def _stepping(
    schema: str, target: Target, taken: Taken, progress: Progress, session: SessionState | None
) -> Operation[Step | str]:
    """Delete the next keys in a savepoint; return the step, or why the range cannot go on."""

    def checked() -> Operation[Step]:
        step = yield from deleting(schema, target, taken, progress)
        yield from checking(schema, session)
        return step

    try:
        return (yield from saved(checked()))
    except OperationRefused as refusal:
        return str(refusal)
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        return reason


def _results(taken: Taken, before: Progress, found: Step | str) -> Results:
    """Return the outcome of a range that is done, or that cannot go on."""
    results = Results()
    if isinstance(found, Step):
        deleted = found.progress.deleted
        details = {"outcome": "applied", "deleted": deleted}
        results.replies.append(Reply(taken, 200, details, "D" if deleted else None))
    else:
        results.refuse(taken, f"{found}, after {before.deleted:,} keys were deleted" if before.deleted else found)
    return results
