"""The main path: node, clock, outbox, inbox and the tables around them.

Revision ids are RRNN: release, then number within it. Names are unqualified: the environment pins
`search_path` to the node's schema for the run.
"""

from alembic import op
from mailroom.schema import refuse_to_drop_messages

revision = "0101"
down_revision = None
branch_labels = None
depends_on = None

# A message has these columns in every table, so that every move is a plain INSERT .. SELECT.
MESSAGE = """
    message_id   uuid        NOT NULL,
    topic        text        COLLATE "C" NOT NULL,
    key          text        COLLATE "C" NOT NULL,
    kind         "char"      NOT NULL,
    message_type "char"      NOT NULL,
    event_type   "char",
    value        bytea,
    value_json   jsonb,
    headers      jsonb,
    expires_at   timestamptz,
    after_clock  bigint,
    source       text        COLLATE "C",
    sent_at      timestamptz NOT NULL
"""

COMMENTS_OF_MESSAGE = {
    "message_id": "The message's id, which never changes; an idempotency key for effects outside the database.",
    "topic": "What the message is addressed to.",
    "key": "Ordering key within an inbox. An unordered message has its id as key.",
    "kind": "M message, E event, C command, R reply.",
    "message_type": "O object, D database, C collection, U user-defined.",
    "event_type": "C created, U updated, D deleted.",
    "value": "The value as CBOR; exactly one of value and value_json is set.",
    "value_json": "The value as JSON, for writers that have no CBOR.",
    "headers": "Flat map of text to text.",
    "expires_at": "If not delivered before this time, the message is dropped.",
    "after_clock": "The stamp is later than this clock: that of a cause on another node.",
    "source": "Who sent it: the writer's application_name.",
    "sent_at": "Physical time of the send; order never rests on it.",
}

# Rows are inserted once and deleted once. Small fixed thresholds keep dead rows few, whatever the size of the table.
HOT = """
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000
"""

NODE = """
CREATE TABLE node (
    single        boolean PRIMARY KEY DEFAULT true CHECK (single),
    id            uuid    NOT NULL DEFAULT gen_random_uuid(),
    name          text    COLLATE "C" NOT NULL DEFAULT current_schema(),
    incarnation   bigint  NOT NULL DEFAULT 1,
    clock_ceiling bigint  NOT NULL DEFAULT 0
)
"""

# A sequence, not a row: under a held snapshot, a row that every delivery updates leaves a dead version each time.
CLOCK = "CREATE SEQUENCE clock AS bigint MINVALUE 0 START 0 CACHE 1 NO CYCLE"

# The topic's length is not part of its pattern: a bounded repetition doubled the cost of the whole insert.
# `xact` comes first, so that a transaction has its id before it draws a position: pg_locks then shows the id of every
# writer that holds a position. The floor depends on this.
OUTBOX = f"""
CREATE TABLE outbox (
    xact         xid8        NOT NULL DEFAULT pg_current_xact_id(),
    position     bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    message_id   uuid        NOT NULL DEFAULT gen_random_uuid(),
    topic        text        COLLATE "C" NOT NULL,
    key          text        COLLATE "C" NOT NULL DEFAULT gen_random_uuid()::text,
    kind         "char"      NOT NULL DEFAULT 'M',
    message_type "char"      NOT NULL DEFAULT 'U',
    event_type   "char",
    value        bytea,
    value_json   jsonb,
    headers      jsonb,
    deliver_at   timestamptz,
    expires_at   timestamptz,
    after_clock  bigint,
    source       text        COLLATE "C" DEFAULT current_setting('application_name'),
    sent_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT outbox_topic        CHECK (topic ~ '^[A-Za-z][A-Za-z0-9_.-]*$' AND octet_length(topic) <= 200),
    CONSTRAINT outbox_key          CHECK (octet_length(key) BETWEEN 1 AND 1024),
    CONSTRAINT outbox_kind         CHECK (kind IN ('M', 'E', 'C', 'R')),
    CONSTRAINT outbox_message_type CHECK (message_type IN ('O', 'D', 'C', 'U')),
    CONSTRAINT outbox_event_type   CHECK (event_type IN ('C', 'U', 'D')),
    CONSTRAINT outbox_one_value    CHECK (num_nonnulls(value, value_json) = 1),
    CONSTRAINT outbox_value        CHECK (octet_length(value) <= 16777216),
    CONSTRAINT outbox_value_json   CHECK (octet_length(value_json::text) <= 16777216),
    CONSTRAINT outbox_headers      CHECK (jsonb_typeof(headers) = 'object' AND octet_length(headers::text) <= 8192
                                          AND NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() <> "string")')),
    CONSTRAINT outbox_deliver_at   CHECK (deliver_at >= '0001-01-01 UTC' AND deliver_at < '9999-01-01 UTC'),
    CONSTRAINT outbox_expires_at   CHECK (expires_at >= '0001-01-01 UTC' AND expires_at < '9999-01-01 UTC'),
    CONSTRAINT outbox_sent_at      CHECK (sent_at >= '0001-01-01 UTC' AND sent_at < '9999-01-01 UTC'),
    CONSTRAINT outbox_after_clock  CHECK (after_clock BETWEEN 0 AND 4611686018427387904),
    CONSTRAINT outbox_source       CHECK (octet_length(source) <= 200)
) WITH ({HOT})
"""

# The trigger sends NOTIFY only while no dispatcher is awake, since NOTIFY takes a lock at commit that the whole cluster
# shares. The check is one expression that releases at once what it locks, so nothing is held until commit. It is not a
# WHEN of the trigger, which PostgreSQL parses again for each statement. Parentheses, since IF reads to the first THEN.
DOORBELL = """
CREATE FUNCTION doorbell() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (current_setting('mailroom.notify', true) IS DISTINCT FROM 'off'
        AND CASE WHEN pg_try_advisory_lock_shared(1835100524, (tg_relid::bigint - 2147483648)::integer)
                 THEN pg_advisory_unlock_shared(1835100524, (tg_relid::bigint - 2147483648)::integer)
                 ELSE false END) THEN
        PERFORM pg_notify(concat('mailroom:', tg_relid), '');
    END IF;
    RETURN NULL;
END $$
"""
TRIGGER = "CREATE TRIGGER doorbell BEFORE INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION doorbell()"

INBOX = f"""
CREATE TABLE inbox (
    inbox        text        COLLATE "C" NOT NULL,
    clock        bigint      NOT NULL,
    sent_clock   bigint      NOT NULL,
    origin       uuid        NOT NULL,
    delivered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    {MESSAGE}
) PARTITION BY LIST (inbox)
"""

REGISTRY = """
CREATE TABLE inbox_registry (
    name          text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$'),
    backoff_s     double precision NOT NULL DEFAULT 1  CHECK (backoff_s >= 0),
    backoff_max_s double precision NOT NULL DEFAULT 60 CHECK (backoff_max_s >= backoff_s),
    floor         bigint NOT NULL DEFAULT 0,
    created_at    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
"""

SUBSCRIPTION = """
CREATE TABLE subscription (
    topic text COLLATE "C" NOT NULL CHECK (topic ~ '^[A-Za-z][A-Za-z0-9_.-]{0,199}$'),
    inbox text COLLATE "C" NOT NULL,
    PRIMARY KEY (topic, inbox)
)
"""

KEY_STATE = """
CREATE TABLE key_state (
    inbox      text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    clock      bigint NOT NULL,
    attempts   integer NOT NULL,
    retry_at   timestamptz NOT NULL,
    last_error text,
    PRIMARY KEY (inbox, key)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
"""

SCHEDULED = f"""
CREATE TABLE scheduled (
    deliver_at timestamptz NOT NULL,
    position   bigint NOT NULL,
    {MESSAGE},
    PRIMARY KEY (deliver_at, position)
)
"""

DEAD_LETTER = f"""
CREATE TABLE dead_letter (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    stage     text COLLATE "C" NOT NULL,
    reason    text NOT NULL,
    {MESSAGE}
)
"""

LEASE = """
CREATE TABLE lease (
    role         text COLLATE "C" PRIMARY KEY,
    holder       uuid NOT NULL,
    epoch        bigint NOT NULL,
    until        timestamptz NOT NULL,
    host         text NOT NULL,
    pid          integer NOT NULL,
    backend_pid  integer NOT NULL,
    backend_from timestamptz NOT NULL,
    state        text COLLATE "C" NOT NULL,
    counts       jsonb NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
"""

COMMENTS = {
    "node": (
        "This node: one row, not touched in the hot path.",
        {
            "single": "Limits the table to one row.",
            "id": "The node's id: the `origin` of its messages.",
            "name": "The node's name, for people.",
            "incarnation": "Raised when history was lost, so that clocks of two histories are distinguishable.",
            "clock_ceiling": "No clock above it is given out. It is raised durably before the clock passes it.",
        },
    ),
    "outbox": (
        "Where writers commit messages. Inserted once, deleted once by the dispatcher, never updated.",
        {
            "xact": "The writer's transaction. Writers do not set it.",
            "position": "Order of sending within a transaction. Writers do not set it.",
            "deliver_at": "The message is not delivered before this time; until then it waits in `scheduled`.",
            **COMMENTS_OF_MESSAGE,
        },
    ),
    "inbox": (
        "Delivered messages, one partition per inbox; a key is reaped in clock order.",
        {
            "inbox": "The inbox's name.",
            "clock": "Lamport clock of this node's stamp: unique and rising.",
            "sent_clock": "Lamport clock of the origin's send event.",
            "origin": "The node that sent it.",
            "delivered_at": "Physical time of the delivery.",
            **COMMENTS_OF_MESSAGE,
        },
    ),
    "inbox_registry": (
        "The inboxes and their settings.",
        {
            "name": "The inbox's name; its partition is inbox_<name>.",
            "backoff_s": "Wait after a key's first failure, in seconds; each further failure doubles it.",
            "backoff_max_s": "The longest wait, in seconds.",
            "floor": "No message has a clock at or below it, so claims start their scans here. It only saves time.",
            "created_at": "When it was created.",
        },
    ),
    "subscription": (
        "Which inbox gets which topic, beside the inbox of the topic's own name.",
        {
            "topic": "The exact topic.",
            "inbox": "The inbox that gets it.",
        },
    ),
    "key_state": (
        "The failing keys: those with a message whose last attempt failed, or that was in a batch that failed.",
        {
            "inbox": "The inbox.",
            "key": "The key.",
            "clock": "Clock of the message that failed.",
            "attempts": "How often it failed.",
            "retry_at": "The key waits until this time; other keys go on.",
            "last_error": "The last failure, truncated.",
        },
    ),
    "scheduled": (
        "Messages whose deliver_at lies ahead; they go back to the outbox when due.",
        {
            "deliver_at": "When it is due.",
            "position": "Its first position in the outbox.",
            **COMMENTS_OF_MESSAGE,
        },
    ),
    "dead_letter": (
        "Where single messages end that cannot be delivered.",
        {
            "id": "The number of the dead letter.",
            "failed_at": "When it was inserted.",
            "stage": "Where it failed.",
            "reason": "Why.",
            **COMMENTS_OF_MESSAGE,
        },
    ),
    "lease": (
        "Who leads, by database time. Safety never rests on it.",
        {
            "role": "The role: dispatcher or executor.",
            "holder": "The id of the process that holds it.",
            "epoch": "Raised by each takeover.",
            "until": "When the lease expires unless renewed.",
            "host": "The holder's host.",
            "pid": "The holder's process id.",
            "backend_pid": "The session that may hold the awake lock; a new leader terminates it.",
            "backend_from": "When that session began, so that no later session with the same process id is terminated.",
            "state": "The holder's state at the last renewal: awake or asleep.",
            "counts": "The holder's totals.",
        },
    ),
}

MAKE = (
    NODE, CLOCK, OUTBOX, DOORBELL, TRIGGER, INBOX, REGISTRY, SUBSCRIPTION, KEY_STATE, SCHEDULED, DEAD_LETTER, LEASE
)  # fmt: skip
TABLES = ("lease", "dead_letter", "scheduled", "key_state", "subscription", "inbox_registry", "inbox", "outbox", "node")


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)
    op.execute("INSERT INTO node DEFAULT VALUES")
    op.execute(
        "COMMENT ON SEQUENCE clock IS 'The node''s Lamport clock. Only the holder of the dispatch lock moves it.'"
    )
    op.execute("COMMENT ON FUNCTION doorbell() IS 'Wakes a sleeping dispatcher: NOTIFY mailroom:<oid of the table>.'")
    for table, (about, columns) in COMMENTS.items():
        op.execute(f"COMMENT ON TABLE {table} IS '{about.replace(chr(39), chr(39) * 2)}'")
        for column, text in columns.items():
            op.execute(f"COMMENT ON COLUMN {table}.{column} IS '{text.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), ("outbox", "inbox", "scheduled", "dead_letter"))
    for table in TABLES:
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION doorbell()")
    op.execute("DROP SEQUENCE clock")
