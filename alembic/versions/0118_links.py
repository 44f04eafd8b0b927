"""Links: what other nodes read of this one, and what this node has received from others."""

from alembic import op
from mailroom.schema import refuse_to_drop_messages

revision = "0118"
down_revision = "0117"
branch_labels = None
depends_on = None

# A name is also part of MAILROOM_DSN_<NAME>, and of what people type.
NAME = "CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$')"
# As in mailroom.names.
SCHEMA = "CHECK (schema ~ '^[a-z][a-z0-9_]{0,40}$')"

NODE = """
ALTER TABLE node
    ADD wire         smallint NOT NULL DEFAULT 1,
    ADD system_id    bigint,
    ADD database_oid bigint,
    ADD timeline     bigint,
    ADD started_at   timestamptz,
    ADD life         uuid     NOT NULL DEFAULT gen_random_uuid(),
    ADD resumed      bigint   NOT NULL DEFAULT 1
"""
# A node is called as its database is, not as its schema, which is the same in most databases.
NAME_OF_DATABASE = """
UPDATE node SET name = current_database()
WHERE name = current_schema() AND current_database() ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'
"""

RESUMED = "UPDATE node SET resumed = incarnation"

# Small tables that are updated often: few rows per page, vacuumed early.
BUSY = "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500"
# As in 0101: fixed thresholds, whatever the size of the table.
HOT = """
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000
"""

# An identity never gives out a number twice, so a link that was removed and allowed again is another link.
LINK = f"""
CREATE TABLE link (
    number              bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    name                text   COLLATE "C" NOT NULL UNIQUE {NAME},
    reader_id           uuid   UNIQUE,
    reader_system_id    bigint,
    reader_database_oid bigint,
    reader_origin       bigint,
    run                 uuid,
    acked               bigint NOT NULL DEFAULT 0,
    matched             uuid,
    wanted_clock        bigint NOT NULL DEFAULT 0 CHECK (wanted_clock BETWEEN 0 AND 4611686018427387904),
    claim_seq           bigint,
    claim_clock         bigint,
    seen_at             timestamptz,
    keep_s              double precision NOT NULL DEFAULT 172800 CHECK (keep_s >= 0),
    max_rows            bigint CHECK (max_rows > 0),
    state               text   COLLATE "C" NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'cut')),
    created_at          timestamptz NOT NULL DEFAULT now()
) WITH ({BUSY})
"""
# As in `subscription` (0114), so that a pattern means the same on both sides.
LINK_TOPIC = r"""
CREATE TABLE link_topic (
    topic text COLLATE "C" NOT NULL CONSTRAINT link_topic_topic CHECK (octet_length(topic) <= 200 AND (
        topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'
        OR topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$')),
    link  bigint NOT NULL,
    fits  text COLLATE "C" GENERATED ALWAYS AS (CASE WHEN topic ~ '[*#]' THEN translate(
        regexp_replace(topic, '([\\_%])', '\\\1', 'g') || CASE WHEN topic ~ '#$' THEN '' ELSE '.' END, '*#', '%%')
        END) STORED,
    words integer GENERATED ALWAYS AS (
        CASE WHEN topic ~ '[*]' THEN cardinality(string_to_array(topic, '.')) END) STORED,
    PRIMARY KEY (topic, link)
)
"""
LINK_TOPIC_LINK = "CREATE INDEX link_topic_link ON link_topic (link)"
LINK_TOPIC_PATTERN = "CREATE INDEX link_topic_pattern ON link_topic (fits, words, link) WHERE fits IS NOT NULL"

# No foreign keys to `link`: they would lock a row of it for each message.
TRANSIT = f"""
CREATE TABLE transit (
    link         bigint      NOT NULL,
    seq          bigint      NOT NULL,
    sent_clock   bigint      NOT NULL,
    stamped_at   timestamptz NOT NULL,
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
    sent_at      timestamptz NOT NULL,
    PRIMARY KEY (link, seq)
) WITH ({HOT})
"""

ORIGIN = f"""
CREATE TABLE origin (
    number      bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    name        text   COLLATE "C" NOT NULL UNIQUE {NAME},
    service     text,
    schema      text   COLLATE "C" NOT NULL DEFAULT 'mailroom' {SCHEMA},
    reader      text   COLLATE "C",
    id          uuid,
    incarnation bigint,
    system_id   bigint,
    timeline    bigint,
    link        bigint,
    shown       bigint NOT NULL DEFAULT 0,
    state       text   COLLATE "C" NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'stopped', 'excluded')),
    why         text,
    created_at  timestamptz NOT NULL DEFAULT now()
) WITH ({BUSY})
"""
# EXTERNAL: ids are random, and compressing them in vain costs time.
RECEIPT = f"""
CREATE TABLE receipt (
    origin      bigint      NOT NULL,
    last        bigint      NOT NULL,
    first       bigint      NOT NULL,
    last_id     uuid        NOT NULL,
    stamped_at  timestamptz NOT NULL,
    sent_clock  bigint      NOT NULL,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ids         uuid[]      NOT NULL,
    PRIMARY KEY (origin, last)
) WITH ({HOT})
"""
IDS = "ALTER TABLE receipt ALTER ids SET STORAGE EXTERNAL"
KNOWN = "CREATE TABLE known (origin bigint NOT NULL, message_id uuid NOT NULL, PRIMARY KEY (origin, message_id))"
STABLE = f"""
CREATE TABLE stable (
    inbox text   COLLATE "C" NOT NULL,
    clock bigint NOT NULL,
    PRIMARY KEY (inbox, clock)
) WITH ({HOT})
"""

SUBSCRIPTION = """
ALTER TABLE subscription
    ADD origin text   COLLATE "C" NOT NULL DEFAULT ''
        CONSTRAINT subscription_origin CHECK (origin ~ '^([A-Za-z][A-Za-z0-9_.-]{0,62}|[*]|)$'),
    ADD since  bigint NOT NULL DEFAULT 0,
    DROP CONSTRAINT subscription_pkey,
    ADD PRIMARY KEY (topic, inbox, origin)
"""
# With the origin, so that a delivery reads all that it needs of patterns from the index.
PATTERN = "DROP INDEX subscription_pattern"
PATTERN_OF = """
CREATE INDEX subscription_pattern ON subscription (fits, words, inbox, origin, since) WHERE fits IS NOT NULL
"""
DEAD_LETTER = "ALTER TABLE dead_letter ADD origin uuid, ADD sent_clock bigint"
REGISTRY = """
ALTER TABLE inbox_registry
    ADD "order"    text   COLLATE "C" NOT NULL DEFAULT 'key' CHECK ("order" IN ('key', 'total')),
    ADD sent_floor bigint NOT NULL DEFAULT 0
"""
# Most nodes have no total inbox, and each delivery asks.
TOTAL = """CREATE INDEX registry_total ON inbox_registry (name) WHERE "order" = 'total'"""

COMMENTS_OF_MESSAGE = {
    "message_id": "The message's id, which never changes; an idempotency key for effects outside the database.",
    "topic": "What the message is addressed to.",
    "key": "Ordering key within an inbox. An unordered message has its id as key.",
    "kind": "M message, E event, C command, R reply; H a mark, which is no message and only shows a clock.",
    "message_type": "O object, D database, C collection, U user-defined.",
    "event_type": "C created, U updated, D deleted.",
    "value": "The value as CBOR; exactly one of value and value_json is set.",
    "value_json": "The value as JSON, for writers that have no CBOR.",
    "headers": "Flat map of text to text.",
    "expires_at": "If not received before this time, the message is dropped.",
    "after_clock": "The stamp is later than this clock: that of a cause on another node.",
    "source": "Who sent it: the writer's application_name.",
    "sent_at": "Physical time of the send; order never rests on it.",
}

COMMENTS: dict[str, dict[str | None, str]] = {
    "node": {
        "name": "The node's name, for people; at first that of its database.",
        "wire": "The version of the columns that cross a link.",
        "system_id": "The server's system identifier when a dispatcher last started.",
        "database_oid": "The database's oid then. With another one, this is a copy of the database.",
        "timeline": "The server's timeline then.",
        "started_at": "When the server had started then. With another time, a crash may have lost something.",
        "resumed": "The incarnation up to which total inboxes go on; a new one keeps them stopped until `link resume`.",
        "life": "Made anew whenever history may have been lost: the links that matched before are in doubt.",
    },
    "link": {
        None: "Who reads messages of this node: a row per reader.",
        "number": "The link's number; never used again.",
        "name": "The reader's name.",
        "reader_id": "The reader's node id, from its first hello on.",
        "reader_system_id": "The system identifier of the reader's server.",
        "reader_database_oid": "The oid of the reader's database.",
        "reader_origin": "The number that the reader gives this node. With a higher one it has forgotten the old.",
        "run": "Which daemon of the reader has the link: the one that said hello last.",
        "acked": "Up to this seq the reader has received everything durably.",
        "matched": "The life of this node in which the reader last found its own position here.",
        "wanted_clock": "The reader wants a mark with at least this clock.",
        "claim_seq": "What a reader that has diverged has received of this node: the last seq.",
        "claim_clock": "The largest sent_clock of it.",
        "seen_at": "When the reader was last here.",
        "keep_s": "How many seconds rows of transit are kept after they were acknowledged.",
        "max_rows": "With more rows than that waiting in transit the link is cut; null for no limit.",
        "state": "The state: open, or cut, when nothing is stamped for it any more.",
        "created_at": "When it was allowed.",
    },
    "link_topic": {
        None: "What each reader wants, written by the reader from its subscriptions.",
        "topic": "The topic, or a pattern of topics, as in subscription.",
        "link": "The link.",
        "fits": "Of a pattern: what a topic with a dot behind it must be LIKE.",
        "words": "Of a pattern with *: how many words the topic must have.",
    },
    "transit": {
        None: "Messages stamped for other nodes, until these have received them. The newest row of a link stays.",
        "link": "The link.",
        "seq": "The number within the link, from 1 without gaps, in clock order.",
        "sent_clock": "Lamport clock of the send event on this node.",
        "stamped_at": "When it was stamped. With message_id it tells apart two histories that have the same seq.",
        **COMMENTS_OF_MESSAGE,
    },
    "origin": {
        None: "The nodes that this one reads: a row per link, on the reader's side.",
        "number": "Its number here; never used again.",
        "name": "The source's name.",
        "service": "The entry of libpq's service file that leads there; null: the environment says it. No password.",
        "schema": "The source's schema there.",
        "reader": "The name under which the source knows this node; null: the node's own name.",
        "id": "The source's node id, pinned at the first hello: the origin of its messages.",
        "incarnation": "The source's incarnation of which messages were received last.",
        "system_id": "The system identifier of the source's server.",
        "timeline": "The highest timeline seen of that server.",
        "link": "The link's number at the source.",
        "shown": "Everything of the source up to this clock is here, or will never be wanted; see also receipt.",
        "state": "The state: open, stopped (for the reason in why), or excluded by hand.",
        "why": "Why it is stopped, and what to do.",
        "created_at": "When it was added.",
    },
    "receipt": {
        None: "What was received: a row per batch. The newest row of an origin is the position, and stays.",
        "origin": "The number of the origin.",
        "last": "The last seq of the batch.",
        "first": "The first seq of the batch.",
        "last_id": "The message_id of the last row.",
        "stamped_at": "The stamped_at of the last row.",
        "sent_clock": "The sent_clock of the last row.",
        "received_at": "When it was received.",
        "ids": "The message ids of the batch, by seq; emptied after a while.",
    },
    "known": {
        None: "Messages that were received from a history which the origin has lost. They are not taken twice.",
        "origin": "The number of the origin.",
        "message_id": "The message.",
    },
    "stable": {
        None: "How far a total inbox may be given out; the newest row counts.",
        "inbox": "The inbox.",
        "clock": "Every message with a sent_clock up to this one has been received.",
    },
    "subscription": {
        "origin": "Whose messages: empty for this node, a name of origin, or * for this node and all origins.",
        "since": "Only messages with a later sent_clock.",
    },
    "dead_letter": {
        "origin": "The node that sent it; null for this one.",
        "sent_clock": "Its clock there.",
    },
    "inbox_registry": {
        "order": "The order in which messages are reaped: key, or total, by sent_clock and origin.",
        "sent_floor": "Of a total inbox: no message has a sent_clock at or below it, nor will have one. It saves time.",
    },
}

STATEMENTS = (
    NODE, NAME_OF_DATABASE, RESUMED, LINK, LINK_TOPIC, LINK_TOPIC_LINK, LINK_TOPIC_PATTERN, TRANSIT, ORIGIN, RECEIPT,
    IDS, KNOWN, STABLE, SUBSCRIPTION, PATTERN, PATTERN_OF, DEAD_LETTER, REGISTRY,
    TOTAL,
)  # fmt: skip


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table, columns in COMMENTS.items():
        for column, text in columns.items():
            what = f"TABLE {table}" if column is None else f'COLUMN {table}."{column}"'
            op.execute(f"COMMENT ON {what} IS '{text.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), ("transit",))
    op.execute('ALTER TABLE inbox_registry DROP "order", DROP sent_floor')
    op.execute("ALTER TABLE dead_letter DROP origin, DROP sent_clock")
    op.execute("DELETE FROM subscription WHERE origin NOT IN ('', '*')")
    op.execute(
        "DELETE FROM subscription AS s WHERE origin = '*' AND EXISTS ("
        "SELECT FROM subscription AS o WHERE (o.topic, o.inbox, o.origin) = (s.topic, s.inbox, ''))"
    )
    op.execute("ALTER TABLE subscription DROP origin, DROP since, ADD PRIMARY KEY (topic, inbox)")
    op.execute("CREATE INDEX subscription_pattern ON subscription (fits, words, inbox) WHERE fits IS NOT NULL")
    for table in ("stable", "known", "receipt", "origin", "transit", "link_topic", "link"):
        op.execute(f"DROP TABLE {table}")
    op.execute(
        "ALTER TABLE node DROP wire, DROP system_id, DROP database_oid, DROP timeline, DROP started_at, DROP life, "
        "DROP resumed"
    )
    op.execute("COMMENT ON COLUMN node.name IS 'The node''s name, for people.'")
