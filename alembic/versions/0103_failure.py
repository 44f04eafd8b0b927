"""Failure: attempts and their history, parked keys, workers' in-flight entries, commit tokens, the audit trail."""

from alembic import op
from mailroom.schema import refuse_to_drop_messages

revision = "0103"
down_revision = "0102"
branch_labels = None
depends_on = None

REGISTRY = """
ALTER TABLE inbox_registry
    ADD on_failure   text COLLATE "C" NOT NULL DEFAULT 'park' CHECK (on_failure IN ('park', 'skip')),
    ADD max_attempts integer NOT NULL DEFAULT 3 CHECK (max_attempts >= 1)
"""

KEY_STATE = "ALTER TABLE key_state ADD parked_at timestamptz"
DUE = "CREATE INDEX key_state_due ON key_state (inbox, retry_at, key)"

PARKED = """
CREATE TABLE parked (
    LIKE inbox INCLUDING DEFAULTS INCLUDING COMMENTS,
    PRIMARY KEY (inbox, key, clock)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0)
"""

DEAD_LETTER = """
ALTER TABLE dead_letter
    ADD inbox    text COLLATE "C",
    ADD clock    bigint,
    ADD attempts integer
"""

ATTEMPT = """
CREATE TABLE attempt (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    inbox      text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    clock      bigint NOT NULL,
    message_id uuid NOT NULL,
    attempt    integer NOT NULL,
    outcome    text COLLATE "C" NOT NULL,
    error      text NOT NULL,
    worker     text NOT NULL DEFAULT current_setting('application_name')
)
"""
ATTEMPT_KEY = "CREATE INDEX attempt_key ON attempt (inbox, key, clock)"
ATTEMPT_AT = "CREATE INDEX attempt_at ON attempt (at)"

WORKER = """
CREATE TABLE worker (
    id         uuid PRIMARY KEY,
    inbox      text COLLATE "C" NOT NULL,
    host       text NOT NULL,
    pid        integer NOT NULL,
    claimed_at timestamptz NOT NULL,
    messages   integer NOT NULL,
    keys       text[] COLLATE "C" NOT NULL,
    clocks     bigint[] NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
"""

TOKENS = """
CREATE TABLE commit_token (
    token     uuid PRIMARY KEY,
    committed boolean NOT NULL
)
"""
SWEPT = "ALTER TABLE node ADD tokens_swept uuid"

AUDIT = """
CREATE TABLE audit (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor    text NOT NULL,
    role     text NOT NULL DEFAULT session_user,
    action   text COLLATE "C" NOT NULL,
    inbox    text COLLATE "C",
    key      text COLLATE "C",
    messages bigint NOT NULL,
    reason   text
)
"""
AUDIT_AT = "CREATE INDEX audit_at ON audit (at)"

COMMENTS = {
    "inbox_registry": {
        "on_failure": "When no attempt is left: park the key, or skip the message into dead_letter.",
        "max_attempts": "How often a message is tried.",
    },
    "key_state": {
        "clock": "Clock of the message that failed. Up to it the key is tried one message at a time.",
        "attempts": "How often that message failed; 0 if only its batch failed.",
        "retry_at": "The key waits until this time, infinity while it is parked. Other keys go on.",
        "parked_at": "Since when the key is parked: its messages wait, in order, in `parked` until somebody acts.",
    },
    "dead_letter": {
        "inbox": "The inbox in which it was skipped; null if it was never delivered.",
        "clock": "Its clock in that inbox.",
        "attempts": "How often it was tried in that inbox.",
    },
    "parked": {None: "Messages of parked keys, with the clocks they had; replayed in that order."},
    "attempt": {
        None: "The history of failed attempts, kept for a while.",
        "id": "Its number.",
        "at": "When it was recorded.",
        "inbox": "The inbox.",
        "key": "The key.",
        "clock": "The message's clock in the inbox.",
        "message_id": "The message.",
        "attempt": "The number of the attempt, from 1.",
        "outcome": "The outcome: retry, park or skip.",
        "error": "Why it failed, truncated.",
        "worker": "The worker that recorded it.",
    },
    "worker": {
        None: "In-flight entries: each loop of a worker has one. If its messages are not locked, the loop died.",
        "id": "The loop.",
        "inbox": "Its inbox.",
        "host": "The worker's host.",
        "pid": "The worker's process id.",
        "claimed_at": "When the batch was claimed.",
        "messages": "Messages of the batch.",
        "keys": "Keys of the batch.",
        "clocks": "The last clock of each key in the batch.",
    },
    "commit_token": {
        None: "How transactions ended whose COMMIT may have lost its answer.",
        "token": "The transaction's token; it begins with the time, in milliseconds.",
        "committed": "False: it was ruled out before it committed, and can commit no more.",
    },
    "node": {"tokens_swept": "Commit tokens up to this one may have been deleted."},
    "audit": {
        None: "Who did what by hand: to parked keys and dead letters, and registrations.",
        "id": "Its number.",
        "at": "When.",
        "actor": "Who acted, as given by the caller.",
        "role": "The database role that did it.",
        "action": "What was done.",
        "inbox": "In which inbox.",
        "key": "To which key; null if to single messages.",
        "messages": "How many messages it affected.",
        "reason": "Why, as given by the caller.",
    },
}

STATEMENTS = (
    REGISTRY, KEY_STATE, DUE, PARKED, DEAD_LETTER, ATTEMPT, ATTEMPT_KEY, ATTEMPT_AT, WORKER, TOKENS, SWEPT, AUDIT,
    AUDIT_AT,
)  # fmt: skip


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table, columns in COMMENTS.items():
        for column, text in columns.items():
            what = f"TABLE {table}" if column is None else f"COLUMN {table}.{column}"
            op.execute(f"COMMENT ON {what} IS '{text.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), ("parked",))
    for table in ("audit", "commit_token", "worker", "attempt", "parked"):
        op.execute(f"DROP TABLE {table}")
    op.execute("ALTER TABLE node DROP tokens_swept")
    op.execute("ALTER TABLE dead_letter DROP inbox, DROP clock, DROP attempts")
    op.execute("DROP INDEX key_state_due")
    op.execute("ALTER TABLE key_state DROP parked_at")
    op.execute("ALTER TABLE inbox_registry DROP on_failure, DROP max_attempts")
