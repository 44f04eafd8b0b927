"""The matrix: which privileges each purpose needs on the objects of a node, and no others.

This is the one place where they stand. `mailroom grant` makes its statements of it, the page on roles shows it, and a
test holds it against the server's catalog. For a new table of the schema add a right to the purposes that use it: a
test says so if it is in none. Then run `python -m tests.roles_page`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mailroom.message.columns import DELIVERY_ROW, EXECUTABLE_ROW, MESSAGE_ROW, MOVING, Column, written

Kind = Literal["table", "sequence", "function"]
NUMBERED = ("outbox_position", "attempt_id", "audit_id", "dead_letter_id", "link_number", "origin_number")
LINK_FUNCTIONS = (
    "link_next", "link_hold", "link_hello", "link_ask", "link_acknowledge", "link_match", "link_want", "link_claim",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Right:
    """Privileges on one object: `of` a table, a view, a sequence or a function.

    A privilege is a word of SQL, on columns if some follow in parentheses. In `of` the text `{inbox}` stands for an
    inbox, and `{log}` for the log that it reads. If it is `bounded`, only inboxes need it that are given out up to a
    bound, and if it is `of_readers`, only those that read a log (`mailroom.order.traits`). `why` says what is not
    obvious.
    """

    of: str
    privileges: tuple[str, ...]
    why: str = ""
    kind: Kind = "table"
    bounded: bool = False
    of_readers: bool = False

    @property
    def of_inbox(self) -> bool:
        """Whether it depends on the inbox."""
        return "{inbox}" in self.of or self.bounded or self.of_readers


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a database role is for. `inboxes` says which it is granted for: each by its name, or all that there are."""

    about: str
    rights: tuple[Right, ...]
    inboxes: Literal["none", "named", "named or all", "all"] = "none"
    creates: bool = False  # tables of its own in the schema of the node, or in another one


def on(of: str, *privileges: str, why: str = "", bounded: bool = False, of_readers: bool = False) -> Right:
    """Return privileges on a table or view."""
    return Right(of, privileges, why, bounded=bounded, of_readers=of_readers)


def sequence(of: str, *privileges: str, why: str = "") -> Right:
    """Return privileges on a sequence."""
    return Right(of, privileges, why, "sequence")


def function(of: str, why: str = "") -> Right:
    """Return EXECUTE on a function that not every role may call."""
    return Right(of, ("EXECUTE",), why, "function")


def insert(columns: Iterable[str]) -> str:
    """Return INSERT on some columns."""
    return f"INSERT ({', '.join(columns)})"


def select(columns: Iterable[str]) -> str:
    """Return SELECT on some columns."""
    return f"SELECT ({', '.join(columns)})"


def _given(row: Iterable[Column]) -> list[str]:
    """Return the columns that a sender may set; the others are the database's."""
    return [column.name for column in row if column.by != "database"]


REVISION = on("alembic_version", "SELECT", why="every program of Mailroom first asks for the revision")
TOKENS = (
    on("commit_token", "SELECT", "INSERT", why="for unknown commits"),
    on("node", "SELECT (tokens_swept)", why="for unknown commits"),
)
NAME = on("node", "SELECT (name)", why="the label of its metrics")
LEASE = on("lease", "SELECT", "INSERT", "UPDATE", why="who leads")
SENDABLE = [column.name for column in MESSAGE_ROW]
SENDABLE_ON = [column.name for column in MOVING]
DELIVERY = [column.name for column in DELIVERY_ROW]
SENT = on("outbox", insert([*_given(MESSAGE_ROW), "source"]), why="not `xact` and `position`: the order rests on them")

WRITER = (
    REVISION,
    SENT,
    on("outbox", "SELECT (message_id)", why="RETURNING message_id"),
    on("outbox_jdbc_id", "INSERT (id)", why="once="),
    on("outbox_jdbc", "SELECT", "INSERT", why="Spark reads the view's columns before it writes"),
    on("outbox_executable", insert([*_given(EXECUTABLE_ROW), "source"])),
    on("store", "SELECT", why="what executables came to"),
    on("accounting", "SELECT", why="what executables came to"),
    *TOKENS,
)

# The view writes into the outbox with its owner's rights, and into outbox_jdbc_id with the caller's.
JDBC_WRITER = (
    on("outbox_jdbc", "SELECT", "INSERT", why="Spark reads the view's columns before it writes"),
    on("outbox_jdbc_id", "INSERT (id)"),
)

CONSUMED = on(
    "inbox_{inbox}", "SELECT", "DELETE", "UPDATE (inbox)", why="UPDATE to lock rows; the partition fixes the value"
)
# No consumer or writer has DELETE on what it shares with others, or UPDATE on all columns: either is a right to lock
# the table, and to lock a view locks the table below it. So it sets `deleted` (alembic/base/16_rights.sql).
COUNTED = on(
    "my_stat_minute",
    "SELECT",
    "INSERT",
    "UPDATE (delivered, reaped, failed, parked, skipped, batches, handle_s, ages)",
    why="a view: only of the role's own inboxes",
)
READS_LOG = (
    on("lanes_{inbox}", "SELECT", "UPDATE (lane)", why="UPDATE to lock rows", of_readers=True),
    on("receipts_{inbox}", "SELECT", "INSERT", why="how far it has read", of_readers=True),
    on("log_{log}", "SELECT", of_readers=True),
    on("log_registry", "SELECT", of_readers=True),
    on("log_segment", "SELECT", of_readers=True),
    on("log_tick", "SELECT", why="what was delivered when", of_readers=True),
    on("log_topic", "SELECT", why="which topics it reads", of_readers=True),
)
REAPER = (
    REVISION,
    CONSUMED,
    on("inbox_registry", "SELECT", why="names and settings of all inboxes"),
    on(
        "my_key_state", "SELECT", "INSERT",
        "UPDATE (clock, attempts, retry_at, last_error, parked_at, alone_to, suspect_to, resume_at, deleted)",
        why="a view: only of the role's own inboxes",
    ),
    on(
        "my_worker", "SELECT", "INSERT",
        "UPDATE (claimed_at, messages, keys, clocks, process_number, xact, deleted)",
        why="a view: only of the role's own inboxes",
    ),
    on("my_attempt", "SELECT", "INSERT", why="a view: only of the role's own inboxes"),
    COUNTED,
    on(
        "my_limit", "SELECT", "UPDATE (tokens, filled_at, opened_at, opened_why, try_at, tries)",
        why="a view: only of the role's own inboxes",
    ),
    on(
        "my_breaker", "SELECT", "INSERT", "UPDATE (try_at, tries, trying, deleted)",
        why="a view: only of the role's own inboxes",
    ),
    on("my_slot", "SELECT", "UPDATE (slot)", why="a view: only of the role's own inboxes; UPDATE to lock rows"),
    on("parked", "INSERT", why="refused for other inboxes"),
    on("my_reaped", "INSERT", why="a view: only of the role's own inboxes, if they keep what is reaped"),
    on("reaped_day", "SELECT", why="the days of the archive"),
    on("dead_letter", "INSERT", why="refused for other inboxes"),
    on("stable", "SELECT", why="how far a total inbox may be given out", bounded=True),
    on("inbox_{inbox}", "INSERT", why="what fails is diverted from the log", of_readers=True),
    *READS_LOG,
    *TOKENS,
    NAME,
)  # fmt: skip

SPARK_READER = (
    REVISION,
    CONSUMED,
    on("inbox_registry", "SELECT", why="names and settings of all inboxes"),
    on(
        "my_spark_stream",
        "SELECT",
        "INSERT",
        "UPDATE (read, deleted, number, used)",
        why="a view: only of the role's own inboxes",
    ),
    on("my_key_state", "SELECT", why="a view: only of the role's own inboxes"),
    on("my_parked", "SELECT", why="a view: only of the role's own inboxes"),
    on("my_reaped", "INSERT", why="a view: only of the role's own inboxes, if they keep what is reaped"),
    on("reaped_day", "SELECT", why="the days of the archive"),
    on("node", "SELECT"),
    sequence("clock", "SELECT"),
    *READS_LOG,
)

SPARK_WRITER = (
    REVISION,
    on("outbox", insert([*(name for name, _ in written(MESSAGE_ROW)), "source"])),
    on("outbox", "SELECT (position)"),
    on("spark_batch", "SELECT", insert(["name", "batch", "query", "messages", "digest"])),
    on(
        "spark_staging", "SELECT", insert(["token", "name", "batch", "schema"]),
        "UPDATE (part, messages, moved, deleted)",
    ),
    on(
        "spark_bulk", "SELECT", insert(["name", "batch", "source", "constants", "messages"]),
        "UPDATE (moved, first, last, at, deleted)",
    ),
    on("lease", "SELECT (role, until)", why="whether a dispatcher goes on with what a driver has left"),
    on("commit_token", "SELECT", "INSERT", why="for unknown commits"),
    on("node", "SELECT (id, tokens_swept)", why="for unknown commits"),
)  # fmt: skip

# Columns of a message that tell of it, without what it says.
TELLING = [column.name for column in MOVING if column.name not in ("value", "value_json")]
EXECUTABLE_TELLING = [
    *("message_id", "version", "operation", "target", "key", "end_key", "at", "row_limit", "notify"),
    *("headers", "after_clock", "source", "sent_at"),
]

# D-roles-6: Executors and dispatchers have DELETE on `dead_letter`.
EXECUTOR = (
    REVISION,
    LEASE,
    on("execute_turn", "UPDATE", why="to lock it: one executes at a time"),
    on("outbox_executable", "SELECT", "DELETE"),
    sequence("outbox_executable_position_seq", "SELECT", "UPDATE", why="raised if a copy of rows left it behind"),
    on("node", "SELECT (single)", "UPDATE (single)", why="to lock the row while a sequence is raised"),
    NAME,
    on("executable_target", "SELECT"),
    on("executable_function", "SELECT"),
    on("executable_cursor", "SELECT", "INSERT", "UPDATE", "DELETE"),
    on("store", "SELECT", "INSERT", "UPDATE", "DELETE"),
    on("accounting", "SELECT", "INSERT", "UPDATE"),
    on("dead_letter", "INSERT", "DELETE", why="DELETE, as only who has it may write letters of no inbox"),
    on("outbox", insert([name for name, _ in written(MESSAGE_ROW)]), why="answers, and what applied code sends"),
)

DISPATCHER = (
    *EXECUTOR,
    on(
        "node", "SELECT",
        "UPDATE (clock_ceiling, tokens_swept, incarnation, life, system_id, database_oid, timeline, started_at)",
    ),
    sequence("clock", "SELECT", "UPDATE"),
    *(sequence(f"{name}_seq", "SELECT", "UPDATE", why="raised if a copy of rows left it behind") for name in NUMBERED),
    on("dispatch_turn", "UPDATE", why="to lock it: one delivers at a time"),
    on("outbox", "SELECT", insert(SENDABLE), "DELETE", why="INSERT for what is due and for answers"),
    on("scheduled", "SELECT", "INSERT", "UPDATE (position)", "DELETE", why="UPDATE to lock rows"),
    on("periodic", "SELECT", "UPDATE (due_at, next_at, last_at, last_error)"),
    on("subscription", "SELECT"),
    on("fan_out", "SELECT", "INSERT", "DELETE"),
    on("fan_out_way", "SELECT", "INSERT", "DELETE"),
    on("inbox", "SELECT", "INSERT", why="deliveries go through it into all inboxes, new ones too"),
    on("inbox_{inbox}", "SELECT", "DELETE", "UPDATE (inbox)", why="housekeeping: by its name"),
    on(
        "inbox_registry", "SELECT",
        "UPDATE (floor, healthy_floor, sent_floor, expired, lost, lost_to, lost_since, lost_at)",
    ),
    on("limits", "SELECT (inbox, breaker_percent, opened_at)", why="metrics"),
    on("breaker", "SELECT (inbox)", why="metrics"),
    on("stable", "SELECT", "INSERT", "DELETE"),
    on("my_key_state", "SELECT"),
    on("key_state", "SELECT", "UPDATE (alone_to, parked_at, retry_at, resume_at)", "DELETE"),
    on("parked", "SELECT", "INSERT"),
    on("dead_letter", "SELECT"),
    on("log", "SELECT", "INSERT", why="deliveries go through it into all logs, new ones too"),
    on("log_registry", "SELECT"),
    on("log_segment", "SELECT"),
    on("log_tick", "SELECT", "INSERT", "DELETE"),
    on("log_topic", "SELECT", why="metrics"),
    on("log_receipt", "SELECT", "DELETE", why="housekeeping"),
    *(function(f"{name}_log_segment", why="runs as the owner, whose the segments of logs are")
      for name in ("make", "lock", "empty", "drop")),
    on("reaped_day", "SELECT", why="the days of the archive"),
    *(function(f"{name}_reaped_day{end}", why="runs as the owner, whose the days of the archive are")
      for name, end in (("make", "s"), ("empty", ""), ("drop", ""))),
    on("attempt", "SELECT", "UPDATE (at, retry_at)", "DELETE"),
    on("audit", "SELECT", "DELETE"),
    on("outbox_jdbc_id", "SELECT", "INSERT (id)", "DELETE", why="INSERT of what bridges take in from queues"),
    COUNTED,
    on("stat_minute", "SELECT", "DELETE", why="DELETE, as only who has it may write rows of no inbox"),
    on("commit_token", "SELECT", "DELETE"),
    on("spark_batch", "SELECT", "DELETE"),
    on("spark_bulk", "SELECT"),
    on("spark_stream", "SELECT (inbox, upto)", why="what a stream has given out is not dropped"),
    on(
        "link", "SELECT",
        "UPDATE (state, acks, acked_at, claim_seq, claim_clock, run, matched, seen_at)",
        why="the last three for bridges, which it reads itself",
    ),
    function("link_acknowledge", why="for bridges, which it reads itself"),
    on("bridge_out", "SELECT", "UPDATE (state, trouble, why, since, marked_at, marked, lost, tried)"),
    on("bridge_known", "SELECT", "INSERT"),
    on("bridge_parts", "SELECT", "INSERT", "UPDATE", "DELETE"),
    on("bridge_last", "SELECT", "INSERT", "UPDATE"),
    on("bridge_done", "SELECT", "INSERT", "DELETE"),
    on("bridge_in", "SELECT", "UPDATE (lost, history, lacks_from, lacks_to)"),
    on("bridge_position", "SELECT", "INSERT", "UPDATE"),
    on("bridge_mark", "SELECT", "INSERT", "UPDATE"),
    on("link_topic", "SELECT"),
    on("transit", "SELECT", "INSERT", "DELETE"),
    on(
        "origin", "SELECT",
        "UPDATE (id, incarnation, system_id, timeline, link, told, refused, shown, keep_s, state, trouble, why, since)",
    ),
    on("receipt", "SELECT", "INSERT", "UPDATE (ids, last_id, stamped_at, sent_clock)", "DELETE"),
    on("known", "SELECT", "INSERT", "DELETE"),
)  # fmt: skip

OPERATOR = (
    REVISION,
    on("inbox_{inbox}", "SELECT", "INSERT", "DELETE"),
    on("lanes_{inbox}", "SELECT", "UPDATE (lane)", why="UPDATE to lock rows", of_readers=True),
    on("log_registry", "SELECT"),
    on("log_segment", "SELECT"),
    on("log", "SELECT (log, lane)", "INSERT", why="where requeued messages of other nodes enter"),
    on("log_tick", "SELECT (log, rows)", "INSERT"),
    on("inbox", "SELECT", "INSERT", why="where requeued messages enter"),
    on("inbox_registry", "SELECT", "UPDATE (floor, healthy_floor, paused_at, paused_by)"),
    on(
        "limits",
        "SELECT (inbox, opened_at)",
        "UPDATE (opened_at, opened_why, try_at, tries)",
        why="a resume closes a breaker",
    ),
    on(
        "breaker",
        "SELECT (inbox, prefix, separator)",
        "UPDATE (tries, deleted)",
        why="a resume closes those of prefixes; UPDATE to lock rows",
    ),
    on("key_state", "SELECT", "INSERT", "UPDATE", "DELETE"),
    on("parked", "SELECT", "DELETE"),
    on("reaped", "SELECT", why="what was reaped, to be replayed"),
    on("my_reaped", "INSERT", why="a view: what is discarded from inboxes that keep it"),
    on("reaped_day", "SELECT", why="the days of the archive"),
    on(
        "dead_letter",
        "SELECT",
        insert(["stage", "reason", "origin", "sent_clock", "bridge", *SENDABLE_ON]),
        "UPDATE",
        "DELETE",
    ),
    on("attempt", "SELECT", "INSERT"),
    on("audit", "INSERT"),
    on(
        "outbox",
        "SELECT (position, message_id, key)",
        insert(SENDABLE),
        "DELETE",
        why="dead letters that go back, answers, and what is cancelled",
    ),
    on("scheduled", "SELECT (position, deliver_at, message_id, key)", "DELETE", why="to cancel a message"),
    on("outbox_jdbc_id", "SELECT", "DELETE", why="to give the text of a cancelled `once` free"),
    on("periodic", "SELECT", "INSERT", "UPDATE", "DELETE"),
    on("outbox_executable", insert(column.name for column in EXECUTABLE_ROW)),
    on(
        "dispatch_turn",
        "UPDATE",
        why="to lock it: nothing is delivered while a dead letter is requeued or a message cancelled",
    ),
    on("node", "SELECT", "UPDATE (clock_ceiling)"),
    sequence("clock", "SELECT", "UPDATE", why="a requeued message gets a clock"),
    on("fan_out", "SELECT"),
    on("subscription", "SELECT"),
    on("origin", "SELECT"),
    on("link", "SELECT"),
    on("bridge_out", "SELECT (link)"),
    on(
        "transit",
        "SELECT (link, seq)",
        insert(["link", "seq", "sent_clock", "stamped_at", *SENDABLE_ON]),
        why="dead letters that go back to a bridge",
    ),
)

METRICS = (
    REVISION,
    on("node", "SELECT"),
    sequence("clock", "SELECT"),
    *(
        sequence(f"{name}_seq", "SELECT", why="how much of it is used up")
        for name in (*NUMBERED, "outbox_executable_position")
    ),
    on("lease", "SELECT"),
    on("outbox", "SELECT (topic, kind, sent_at)"),
    on("outbox_executable", "SELECT (sent_at)"),
    on("scheduled", "SELECT (deliver_at, sent_at)"),
    on("dead_letter", "SELECT (id, stage, failed_at)"),
    on("spark_bulk", "SELECT (messages, moved)"),
    on("inbox_registry", "SELECT"),
    on("reaped_day", "SELECT"),
    on("log", "SELECT (log, segment, lane, clock, topic, sent_at, delivered_at)", why="all logs, new ones too"),
    on("log_registry", "SELECT"),
    on("log_segment", "SELECT"),
    on("log_tick", "SELECT"),
    on("log_topic", "SELECT"),
    on("log_receipt", "SELECT"),
    on("limits", "SELECT"),
    on("breaker", "SELECT"),
    on("inbox", "SELECT (inbox, clock, sent_clock, delivered_at, sent_at)", why="all inboxes, new ones too"),
    on("key_state", "SELECT (inbox, retry_at, parked_at, paused_at)"),
    on("periodic", "SELECT (name, next_at, paused)"),
    on("parked", "SELECT (inbox)"),
    on("stable", "SELECT"),
    on("subscription", "SELECT"),
    on("link", "SELECT"),
    on("link_topic", "SELECT"),
    on("transit", "SELECT (link, seq, sent_at)"),
    on("origin", "SELECT"),
    on("receipt", "SELECT"),
    on("bridge_out", "SELECT"),
    on("bridge_done", "SELECT"),
    on("bridge_in", "SELECT"),
    on("bridge_position", "SELECT"),
    on("bridge_mark", "SELECT"),
    on("stat_minute", "SELECT"),
    on("statistics", "SELECT"),
)

AUDITOR = (
    *METRICS,
    on("outbox", select(["position", *TELLING])),
    on("fan_out", select(["clock", "sent_clock", "origin", *TELLING])),
    on("outbox_executable", select(["position", *EXECUTABLE_TELLING])),
    on("scheduled", select(["position", *TELLING])),
    on("inbox", select([*DELIVERY, *TELLING]), why="all inboxes, new ones too"),
    on("parked", select([*DELIVERY, *TELLING])),
    on("reaped", select([*DELIVERY, *TELLING, "reaped_at", "drop_on", "discarded"])),
    on(
        "log",
        select(
            [
                *(name for name in DELIVERY if name not in ("inbox", "clock", "delivered_at")),
                *(name for name in TELLING if name not in ("topic", "sent_at")),
            ]
        ),
    ),
    on("dead_letter", select(["inbox", "clock", "reason", "attempts", "origin", "sent_clock", "bridge", *TELLING])),
    on("transit", select(["sent_clock", "stamped_at", *TELLING])),
    on("log_lane", "SELECT"),
    on("link_allowed", "SELECT"),
    on("key_state", "SELECT", why="with the last error of a key"),
    on("attempt", "SELECT"),
    on("audit", "SELECT"),
    on("worker", "SELECT"),
    on("slot", "SELECT"),
    on("fan_out_way", "SELECT"),
    on("known", "SELECT"),
    on("bridge_known", "SELECT"),
    on("bridge_parts", "SELECT"),
    on("bridge_last", "SELECT"),
    on("accounting", "SELECT"),
    on("executable_target", "SELECT"),
    on("executable_function", "SELECT"),
    on(
        "periodic",
        "SELECT (name, cron, time_zone, topic, key, kind, missed, jitter_s, due_at, next_at, last_at, paused, "
        "last_error)",
    ),
    on("spark_batch", "SELECT"),
    on("spark_staging", "SELECT"),
    on("spark_bulk", "SELECT"),
    on("spark_stream", "SELECT"),
    on("spark_drain", "SELECT"),
)

LINK_READER = (
    on("node", "SELECT"),
    on("link", "SELECT"),
    on("link_topic", "SELECT"),
    on("transit", "SELECT"),
    *(function(name, why="runs as the owner, for the link of this login") for name in LINK_FUNCTIONS),
)

PURPOSES = {
    "writer": Purpose("sends messages and executables, also in plain SQL and through outbox_jdbc", WRITER),
    "jdbc-writer": Purpose("sends through outbox_jdbc alone, as Spark by JDBC", JDBC_WRITER),
    "reaper": Purpose("takes messages out of inboxes: services, workers, `inbox reap`", REAPER, inboxes="named"),
    "dispatcher": Purpose("delivers, executes, reads links and does the housekeeping", DISPATCHER, inboxes="all"),
    "executor": Purpose("applies executables, and nothing else", EXECUTOR),
    "operator": Purpose("handles parked keys and dead letters", OPERATOR, inboxes="named or all"),
    "auditor": Purpose("reads what tells of messages, and no values of them", AUDITOR),
    "metrics": Purpose("reads figures: `mailroom status`, and what watches a node", METRICS),
    "link-reader": Purpose("reads a link of this node, for the dispatcher of another one", LINK_READER),
    "spark-writer": Purpose('writes with format("outbox")', SPARK_WRITER, creates=True),
    "spark-reader": Purpose('streams inboxes with format("inbox")', SPARK_READER, inboxes="named"),
}
