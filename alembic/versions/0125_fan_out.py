"""Messages for more inboxes than one transaction may lock: they wait here and get into a few inboxes at a time."""

from alembic import op
from mailroom.schema import refuse_to_drop_messages

revision = "0125"
down_revision = "0124"
branch_labels = None
depends_on = None

# Filled and emptied at once, so vacuumed early.
BUSY = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0"
FAN_OUT = f"""
CREATE TABLE fan_out (
    clock        bigint      PRIMARY KEY,
    sent_clock   bigint      NOT NULL,
    origin       uuid        NOT NULL,
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
) WITH ({BUSY})
"""
WAY = f"""
CREATE TABLE fan_out_way (
    inbox          text COLLATE "C" NOT NULL,
    topic          text COLLATE "C" NOT NULL,
    messages_after bigint,
    events_after   bigint,
    others_after   bigint,
    PRIMARY KEY (inbox, topic)
) WITH ({BUSY})
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
    "expires_at": "If not received before this time, the message is dropped.",
    "after_clock": "The stamp is later than this clock: that of a cause on another node.",
    "source": "Who sent it: the writer's application_name.",
    "sent_at": "Physical time of the send; order never rests on it.",
}
COMMENTS = {
    "TABLE fan_out": "Messages that have their clocks and left the outbox, and that not all of their inboxes have yet.",
    "TABLE fan_out_way": "The inboxes that have not got what is in fan_out yet; nothing else is delivered before.",
    "COLUMN fan_out.clock": "The clock at which it was stamped or received here.",
    "COLUMN fan_out.sent_clock": "The clock at which it was stamped at its origin.",
    "COLUMN fan_out.origin": "The id of the node that stamped it first.",
    **{f"COLUMN fan_out.{column}": text for column, text in COMMENTS_OF_MESSAGE.items()},
    "COLUMN fan_out_way.inbox": "The inbox.",
    "COLUMN fan_out_way.topic": "The topic.",
    "COLUMN fan_out_way.messages_after": "It gets messages with a sent_clock above this; null for none.",
    "COLUMN fan_out_way.events_after": "The same for events.",
    "COLUMN fan_out_way.others_after": "The same for commands and replies.",
}


def upgrade() -> None:
    op.execute(FAN_OUT)
    op.execute(WAY)
    for what, text in COMMENTS.items():
        quoted = text.replace("'", "''")
        op.execute(f"COMMENT ON {what} IS '{quoted}'")


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), ["fan_out"])
    op.execute("DROP TABLE fan_out_way")
    op.execute("DROP TABLE fan_out")
