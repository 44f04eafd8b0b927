"""Results: the replies and dead letters that applied executables give rise to, collected until they are sent."""

from dataclasses import dataclass, field

from dispatcher.executor.batch.fold import CompareFailed, KeyContent, OperationRefused, Rules, Taken, applied
from dispatcher.executor.batch.reply import Reply


@dataclass(slots=True)
class Results:
    """The results of `count` executables: `dead` with the reason for each, and `replies`."""

    count: int = 0
    dead: list[tuple[Taken, str]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def refuse(self, taken: Taken, reason: str) -> None:
        """Record that an executable cannot be applied."""
        self.dead.append((taken, reason))
        if taken.fault is None:  # otherwise its `notify` may not be a valid topic
            self.replies.append(Reply(taken, 500, {"outcome": "refused", "reason": reason}))

    def apply(self, taken: Taken, held: KeyContent | None, rules: Rules) -> tuple[KeyContent | None, bool]:
        """Apply a put, an increment or a delete to what its key holds, and record the result.

        Return what the key holds afterwards, and whether the operation was applied.
        """
        try:
            now = applied(taken, held, rules)
        except CompareFailed as failed:
            if taken.notify is None:
                self.refuse(taken, str(failed))
            else:
                self.replies.append(Reply(taken, 409, {"outcome": "compare failed", "found": failed.found}))
        except OperationRefused as refusal:
            self.refuse(taken, str(refusal))
        else:
            if taken.notify:
                self.replies.append(Reply.of(taken, held, now))
            return now, True
        return held, False

    def add(self, other: "Results") -> None:
        """Add the results of other executables."""
        self.count += other.count
        self.dead += other.dead
        self.replies += other.replies
