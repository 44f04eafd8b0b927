"""The hot statements: each one in the path of a message, an executable or a link.

Each has a file in `tests/sql` (`tests.golden`), and `make sql NAME=deliver` prints one for psql.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from dispatcher.delivery import deliver, fan_out, plain, refusal, sift, single, writers
from dispatcher.executor.applying import delete_range, guarded
from dispatcher.executor.batch import accounting, take
from dispatcher.executor.targets import function, target
from dispatcher.housekeeping import expiry, healthy_floor, janitor, periodic, total_floor
from dispatcher.lanes import doorbell, lease
from dispatcher.links import receive
from dispatcher.links import refusal as link_refusal
from dispatcher.links.at_source import acknowledge, asleep, bounds, fetch
from inbox import parked
from inbox.asking import replies
from inbox.by_key import claim, due, failure, parked_keys, peek
from inbox.by_key.claim import PINNED, Share
from inbox.by_key.entries import BY_ROW
from inbox.by_log import lanes, log_claim, log_failure, log_peek
from inbox.handling import batch
from inbox.keeping import keeping
from inbox.sessions import alive, wakeup
from inbox.total_order import total_claim, total_failure, total_parked
from inbox.worker import in_flight
from mailroom.figures import logs
from mailroom.figures.inboxes import INBOXES, UNREAD
from mailroom.links import marks
from mailroom.links.handshake import hello
from mailroom.logs import segments
from mailroom.message import outgoing
from mailroom.order import clock, traits
from mailroom.order import total as total_order
from mailroom.sql.operation import BOUND, Sql, Statement
from outbox import once, outbox, store

DELIVERY = deliver.DELIVERY_SESSION


@dataclass(frozen=True, slots=True)
class Hot:
    """A statement; the identifiers that it needs beside schema and inbox; and the settings that it runs under."""

    sql: Sql
    names: Mapping[str, str] = field(default_factory=dict)
    session: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan to be explained."""
        return self.sql.template.split(maxsplit=1)[0] in ("WITH", "SELECT", "INSERT", "UPDATE", "DELETE")

    def at(self, schema: str = "mailroom", inbox: str = "shipping") -> Statement:
        """Return the statement as it is at a node."""
        return self.sql.at(**self.names, schema=schema, inbox=inbox)


def _of_one_row(values: Mapping[str, str]) -> dict[str, str]:
    return {"given": ", ".join(values), "values": ", ".join(values.values())}


KEEPING, NOT_KEEPING = keeping(True), keeping(False)
WORKER = Share(100, 100, 100, due_too=False, hold=True)
DUE = {"but_orphaned": due.BUT_ORPHANED}
LOG = {"log": "orders", "lanes": "64"}
ONE_SEGMENT = {"segments": "1", "lowest": "NULL::bigint"}
SEGMENTS = {"segments": "1, 2", "lowest": log_claim.LOWEST}
STORE = {name: text for name, text in target.STORE_TARGET.names("mailroom").items() if name != "schema"}

SENDING = {
    "insert": Hot(outgoing.INSERT, _of_one_row(outgoing.INSERT.values)),
    "insert-once": Hot(once.SEND),
    "insert-many": Hot(outgoing.INSERT.unnest),
    "insert-by-copy": Hot(outgoing.INSERT.copy),
    "may-copy": Hot(BOUND, {"table": "outbox"}),
    "insert-executable": Hot(store.INSERT, _of_one_row(store.INSERT.values)),
    "insert-executables": Hot(store.INSERT.unnest),
    "insert-executables-by-copy": Hot(store.INSERT.copy),
}
DELIVERING = {
    "take-the-turn": Hot(clock.DISPATCH_LOCK, session=DELIVERY),
    "deliver-one": Hot(single.DELIVER_ONE, session=DELIVERY),
    "deliver-plain": Hot(plain.DELIVER_PLAIN, session=DELIVERY),
    "deliver-plain-with-logs": Hot(plain.DELIVER_PLAIN_LOGS, session=DELIVERY),
    "deliver": Hot(deliver.DELIVER, session=DELIVERY),
    "deliver-with-links": Hot(deliver.DELIVER_FULL, session=DELIVERY),
    "raise-stable": Hot(total_order.RAISE, session=DELIVERY),
    "fan-out": Hot(fan_out.STEP, session=DELIVERY),
    "fan-out-done": Hot(fan_out.DONE, session=DELIVERY),
    "fan-out-ask": Hot(fan_out.ASK, session=DELIVERY),
    "fan-out-sift": Hot(fan_out.TRY, session=DELIVERY),
    "ask": Hot(refusal.ASK, session=DELIVERY),
    "sift": Hot(refusal.TRY, session=DELIVERY),
    "sifted": Hot(sift.ANSWER, session=DELIVERY),
    "dead-letter": Hot(refusal.DEAD_LETTER, session=DELIVERY),
    "raise-ceiling": Hot(clock.CEILING),
    "look": Hot(deliver.LOOK, session=DELIVERY),
    "oldest-of-the-outbox": Hot(deliver.OLDEST),
    "is-anything-due": Hot(deliver.DUE),
    "release-what-is-due": Hot(deliver.RELEASE),
    "take-awake": Hot(doorbell.TAKE, {"outbox": "outbox"}),
    "release-awake": Hot(doorbell.RELEASE, {"outbox": "outbox"}),
    "writers": Hot(writers.WRITERS, {"outbox": "outbox"}),
    "lease-holder": Hot(lease.HOLDER),
    "lease-note": Hot(lease.NOTE),
    "lease-bound": Hot(lease.BOUND),
    "lease-take": Hot(lease.TAKE),
    "lease-give-up": Hot(lease.GIVE_UP),
    "lease-backend": Hot(lease.BACKEND),
    "lease-terminate": Hot(lease.TERMINATE[0]),
    "lease-terminate-as-current": Hot(lease.TERMINATE[1]),
}
CLAIMING = {
    "pin": Hot(claim.PIN),
    "reap-key": Hot(claim.REAP_KEY, NOT_KEEPING, PINNED),
    "reap-key-keeping": Hot(claim.REAP_KEY, KEEPING, PINNED),
    "reap-key-again": Hot(claim.HAS_MORE, session=PINNED),
    "reap-one": Hot(claim.REAP_ONE, Share(100, 10, 1_000).names(), PINNED),
    "reap-one-of-a-worker": Hot(claim.REAP_ONE, WORKER.names(), PINNED),
    "reap-plain": Hot(claim.REAP_PLAIN, Share(100, 10, 1_000).names(), PINNED),
    "reap-plain-of-one": Hot(claim.REAP_PLAIN, Share(1, 1, 1).names(), PINNED),
    "reap-plain-of-a-worker": Hot(claim.REAP_PLAIN, WORKER.names(), PINNED),
    "reap-plain-keeping": Hot(claim.REAP_PLAIN, WORKER.names(keeps=True), PINNED),
    "reap-any": Hot(claim.REAP_ANY, Share(100, 10, 1_000).names(), PINNED),
    "reap-any-of-one": Hot(claim.REAP_ANY, Share(1, 1, 1).names(), PINNED),
    "reap-any-of-a-worker": Hot(claim.REAP_ANY, WORKER.names(), PINNED),
    "orphaned-keys": Hot(claim.ORPHANED),
    "reap-due-head": Hot(due.LOCK_HEAD, DUE, PINNED),
    "reap-due": Hot(due.TAKE_HEAD, DUE | NOT_KEEPING | {"held": due.HELD}, PINNED),
    "reap-due-keeping": Hot(due.TAKE_HEAD, DUE | keeping(True, due.HANDED_OUT) | {"held": due.HELD}, PINNED),
    "inbox-order": Hot(traits.ORDER),
    "reap-total-head": Hot(total_claim.LOCK, session=PINNED),
    "reap-total": Hot(
        total_claim.REAP,
        NOT_KEEPING | {"but_orphaned": "", "rows": "100", "held": "EXISTS (SELECT FROM gone)", "due": "0"},
        PINNED,
    ),
    "reap-total-due": Hot(
        total_claim.TAKE, NOT_KEEPING | {"but_orphaned": total_claim.BUT_ORPHANED, "held": total_claim.HELD}, PINNED
    ),
    "reap-replies": Hot(replies.TAKE, NOT_KEEPING),
    "keeps-replies": Hot(replies.KEPT),
    "peek-key": Hot(peek.PEEK_KEY),
    "peek-any": Hot(peek.PEEK_ANY),
    "peek-total": Hot(peek.PEEK_TOTAL),
    "backlog": Hot(peek.BACKLOG),
    "backlog-of-a-key": Hot(peek.BACKLOG_KEY),
}
READING_LOGS = {
    "log-lock": Hot(lanes.LOCK, LOG, PINNED),
    "log-covering": Hot(lanes.COVERING, LOG, PINNED),
    "log-read-plain": Hot(log_claim.READ_PLAIN, LOG | ONE_SEGMENT | {"held": "rows > 0"}, PINNED),
    "log-read-plain-of-segments": Hot(log_claim.READ_PLAIN, LOG | SEGMENTS | {"held": "false"}, PINNED),
    "log-read": Hot(log_claim.READ, LOG | ONE_SEGMENT | {"held": "EXISTS (SELECT FROM given)"}, PINNED),
    "log-read-of-segments": Hot(log_claim.READ, LOG | SEGMENTS | {"held": "false"}, PINNED),
    "log-read-plain-of-topics": Hot(log_claim.READ_PLAIN_TOPICS, LOG | ONE_SEGMENT | {"held": "wanted > 0"}, PINNED),
    "log-read-of-topics": Hot(
        log_claim.READ_TOPICS, LOG | ONE_SEGMENT | {"held": "EXISTS (SELECT FROM given)"}, PINNED
    ),
    "log-read-while-open": Hot(log_claim.READ_OPEN, LOG | ONE_SEGMENT | {"held": "EXISTS (SELECT FROM given)"}, PINNED),
    "log-read-of-topics-while-open": Hot(
        log_claim.READ_TOPICS_OPEN, LOG | ONE_SEGMENT | {"held": "EXISTS (SELECT FROM given)"}, PINNED
    ),
    "log-lost": Hot(lanes.LOST, LOG),
    "log-unpin": Hot(log_claim.UNPIN, session=PINNED),
    "log-orphaned": Hot(log_claim.ORPHANED, LOG, PINNED),
    "log-peek": Hot(log_peek.PEEK, LOG),
    "log-backlog": Hot(log_peek.COUNT, LOG),
    "log-record-a-failure": Hot(log_failure.RECORD, LOG),
    "log-suspect": Hot(log_failure.SUSPECT, LOG),
    "log-status": Hot(UNREAD, LOG | {"names": "shipping"}),
    "log-standing": Hot(logs.READING, LOG | {"names": "shipping"}),
}
ENDING = {
    "settle": Hot(batch.SETTLE),
    "heal": Hot(due.HEAL),
    "heal-total": Hot(total_claim.HEAL),
    "heal-total-of-nothing": Hot(total_claim.HEAL_GONE),
    "record-a-failure": Hot(failure.RECORD),
    "record-a-failure-total": Hot(total_failure.RECORD),
    "suspect": Hot(failure.SUSPECT),
    "suspect-total": Hot(total_failure.SUSPECT),
    "in-flight-entry": Hot(in_flight.ADD, {"holder": BY_ROW["holder"]}, PINNED),
    "in-flight-remove": Hot(in_flight.REMOVE, session=PINNED),
    "in-flight-holders": Hot(in_flight.HOLDERS, session=PINNED),
    "in-flight-let-go": Hot(in_flight.LET_GO, session=PINNED),
    "in-flight-let-go-all": Hot(in_flight.LET_GO_ALL, session=PINNED),
    "in-flight-take-over": Hot(in_flight.TAKE_OVER, {"found": BY_ROW["found"], "is_gone": BY_ROW["is_gone"]}, PINNED),
    "in-flight-was-in-batch": Hot(
        failure.WAS_IN_BATCH, {"there": "{schema}.inbox_{inbox}", "failing": "i.key", "upto": "i.clock"}, PINNED
    ),
    "in-flight-was-in-batch-total": Hot(
        failure.WAS_IN_BATCH, {"there": "{schema}.inbox_{inbox}", "failing": "''", "upto": "i.sent_clock"}, PINNED
    ),
    "silent-processes": Hot(alive.UNLOCKED, session=PINNED),
    "fall-asleep": Hot(wakeup.FALL_ASLEEP),
    "wake-up": Hot(wakeup.WAKE_UP),
    "fall-asleep-on-log": Hot(wakeup.FALL_ASLEEP_ON_LOG, LOG),
    "wake-up-on-log": Hot(wakeup.WAKE_UP_ON_LOG, LOG),
    "reads-a-log": Hot(wakeup.READS),
}
PARKING = {
    "park-behind": Hot(parked_keys.MOVE),
    "parked-keys": Hot(parked_keys.KEYS),
    "parked-total": Hot(total_parked.KEYS),
    "parked-messages": Hot(parked_keys.MESSAGES),
    "parked-messages-total": Hot(total_parked.MESSAGES),
    "parked-attempts": Hot(parked.ATTEMPTS),
    "hold-parked": Hot(parked.LOCK),
    "replay": Hot(parked_keys.REPLAY),
    "replay-total": Hot(total_parked.REPLAY),
    "replay-lower": Hot(parked_keys.LOWER),
    "replay-notify": Hot(parked_keys.NOTIFY),
    "discard": Hot(parked_keys.DISCARD),
    "discard-total": Hot(total_parked.DISCARD),
}
KEEPING_HOUSE = {
    "floor-lags": Hot(janitor.FLOOR_STATE),
    "floor-hold": Hot(janitor.HOLD),
    "floor-oldest": Hot(janitor.OLDEST),
    "floor-clock": Hot(janitor.CLOCK),
    "floor-raise": Hot(janitor.RAISE),
    "healthy-floor-lags": Hot(healthy_floor.LAGS),
    "healthy-floor-hold": Hot(healthy_floor.HOLD),
    "healthy-floor-raise": Hot(healthy_floor.PASS),
    "total-floor-lags": Hot(total_floor.LAG),
    "total-floor-raise": Hot(total_floor.RAISE),
    "total-inboxes": Hot(total_floor.BOUNDED),
    "total-sweep": Hot(total_floor.OLD),
    "failing-inboxes": Hot(janitor.FAILING),
    "sweep-key-state": Hot(janitor.IDLE_KEYS, {"is_read": ""}),
    "expiring-inboxes": Hot(expiry.EXPIRING),
    "remove-what-expired": Hot(expiry.EXPIRED),
    "periodic-look": Hot(periodic.LOOK),
    "periodic-take": Hot(periodic.TAKE),
    "periodic-send": Hot(periodic.SEND),
    "periodic-move": Hot(periodic.MOVE),
    "status-of-inboxes": Hot(INBOXES, {"names": "shipping"}),
    "segments-alone": Hot(segments.ALONE, {"node": "mailroom"}),
    "segments-old-logs": Hot(segments.OLD_LOGS),
    "segments-make": Hot(segments.MAKE, LOG),
    "segments-over": Hot(segments.OVER),
    "segments-holds": Hot(segments.HOLDS, LOG | {"segment": "1"}, {"enable_bitmapscan": "off"}),
    "segments-unread": Hot(segments.UNREAD, LOG | {"segment": "1"}),
    "segments-lock": Hot(segments.LOCK, {"segment": "1"}),
    "segments-read-since": Hot(segments.READ_SINCE, LOG | {"segment": "1"}),
    "segments-lose": Hot(segments.LOSE, LOG | {"segment": "1"}),
    "segments-empty": Hot(segments.EMPTY, {"segment": "1"}),
    "segments-drop": Hot(segments.DROP, {"segment": "1"}),
    "segments-ticks": Hot(segments.TICKS),
    "segments-receipts": Hot(segments.RECEIPTS),
    "segments-readers": Hot(segments.READERS),
}
LINKING = {
    "link-position": Hot(bounds.POSITION),
    "link-bounds": Hot(bounds.BOUNDS),
    "link-fetch": Hot(fetch.FETCH),
    "link-fetch-undecoded": Hot(fetch.FETCH_UNDECODED),
    "link-receive": Hot(receive.RECEIVE, session=DELIVERY),
    "bridge-take-in": Hot(receive.TAKE_IN, session=DELIVERY),
    "link-receive-with-logs": Hot(receive.RECEIVE_LOGS, session=DELIVERY),
    "bridge-take-in-with-logs": Hot(receive.TAKE_IN_LOGS, session=DELIVERY),
    "link-forms": Hot(link_refusal.FORMS),
    "link-ask": Hot(link_refusal.ASK),
    "link-sift": Hot(link_refusal.TRY),
    "link-durable": Hot(clock.DURABLE),
    "link-flush": Hot(acknowledge.FLUSH),
    "link-acknowledge": Hot(acknowledge.ACKNOWLEDGE),
    "link-match": Hot(hello.MATCH),
    "link-ask-for-topics": Hot(hello.ASK),
    "link-channel": Hot(asleep.CHANNEL),
    "link-fall-asleep": Hot(asleep.FALL_ASLEEP),
    "link-wake-up": Hot(asleep.WAKE_UP),
    "mark-wants": Hot(marks.WANTS),
    "mark-highest": Hot(marks.HIGHEST),
    "mark-ask": Hot(marks.ASK),
    "mark-next": Hot(marks.NEXT),
    "mark": Hot(marks.MARK),
}
EXECUTING = {
    "execute-turn": Hot(take.EXECUTE_LOCK, session=DELIVERY),
    "take-executables": Hot(take.OLDEST, session=DELIVERY),
    "take-one-executable": Hot(take.NEXT, session=DELIVERY),
    "remove-executables": Hot(take.REMOVE, session=DELIVERY),
    "execute-targets": Hot(target.TARGETS),
    "execute-find": Hot(target.FIND, STORE | {"skipping": ""}),
    "execute-insert": Hot(target.INSERT, STORE),
    "execute-update": Hot(target.UPDATE, STORE),
    "execute-delete": Hot(target.DELETE, STORE),
    "execute-delete-range": Hot(
        delete_range.DELETE, STORE | {"bounds": " AND t.key >= %(start)s::text::text AND t.key < %(end)s::text::text"}
    ),
    "execute-guarded-give": Hot(guarded.GIVE),
    "execute-guarded": Hot(guarded.APPLY, {name: text.replace("'", "''") for name, text in STORE.items()}),
    "execute-guarded-answer": Hot(guarded.ANSWER),
    "execute-function": Hot(function.CALL, {"function": '"pg_catalog"."jsonb_typeof"'}),
    "execute-function-void": Hot(function.CALL_VOID, {"function": '"pg_catalog"."jsonb_typeof"'}),
    "account-find": Hot(accounting.FIND),
    "account": Hot(accounting.WRITE),
}
HOT = {
    name: hot
    for subject in (SENDING, DELIVERING, CLAIMING, READING_LOGS, ENDING, PARKING, KEEPING_HOUSE, LINKING, EXECUTING)
    for name, hot in subject.items()
}

# All statements of these modules are hot: a new one gets a name above.
# D-tests-5: The text of hot statements is held.
MODULES: tuple[ModuleType, ...] = (
    outgoing, once, outbox, deliver, plain, fan_out, refusal, sift, doorbell, writers, lease, claim, due, failure,
    total_claim, peek, parked, parked_keys, total_failure, total_parked, in_flight, wakeup, replies, healthy_floor,
    total_floor, expiry, bounds, fetch, receive, link_refusal, acknowledge, asleep, marks, take, target, guarded,
    accounting, lanes, log_claim, log_failure, log_peek, segments,
)  # fmt: skip
