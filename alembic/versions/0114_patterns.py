"""Patterns: an inbox subscribes to topics such as `order.*` and `order.#`."""

from alembic import op

revision = "0114"
down_revision = "0113"
branch_labels = None
depends_on = None

# The same patterns as in mailroom/names.py. Of a word that is empty, LIKE thinks as of any other.
TOPIC = (
    "ALTER TABLE subscription DROP CONSTRAINT subscription_topic_check, ADD CONSTRAINT subscription_topic CHECK ("
    "octet_length(topic) <= 200 AND (topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$' "
    "OR topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$'))"
)
# Computed where a pattern is stored, by whomever: also by an INSERT by hand. What means something to LIKE is escaped. A
# dot is put behind the topic that is compared, so that 'order.' is there for order.# to fit order itself.
COLUMNS = r"""
ALTER TABLE subscription
    ADD fits text COLLATE "C" GENERATED ALWAYS AS (CASE WHEN topic ~ '[*#]' THEN translate(
        regexp_replace(topic, '([\\_%])', '\\\1', 'g') || CASE WHEN topic ~ '#$' THEN '' ELSE '.' END, '*#', '%%')
        END) STORED,
    ADD words integer GENERATED ALWAYS AS (
        CASE WHEN topic ~ '[*]' THEN cardinality(string_to_array(topic, '.')) END) STORED
"""
# All that a delivery reads of patterns, and what it finds empty where there are none.
INDEX = "CREATE INDEX subscription_pattern ON subscription (fits, words, inbox) WHERE fits IS NOT NULL"

COMMENTS = {
    "topic": "The topic, or a pattern of topics: * is one word, a last word # any number of words.",
    "fits": "Of a pattern: what a topic with a dot behind it must be LIKE.",
    "words": "Of a pattern with *: how many words the topic must have.",
}


def upgrade() -> None:
    for statement in (TOPIC, COLUMNS, INDEX):
        op.execute(statement)
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN subscription.{column} IS '{text}'")


def downgrade() -> None:
    op.execute("DELETE FROM subscription WHERE fits IS NOT NULL")
    op.execute("ALTER TABLE subscription DROP fits, DROP words, DROP CONSTRAINT subscription_topic")
    op.execute("ALTER TABLE subscription ADD CHECK (topic ~ '^[A-Za-z][A-Za-z0-9_.-]{0,199}$')")
    op.execute("COMMENT ON COLUMN subscription.topic IS 'The exact topic.'")
