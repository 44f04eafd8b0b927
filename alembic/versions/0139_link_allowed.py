"""What a reader may ask for, by the word of the source: which topics, and whether their commands."""

from alembic import op

revision = "0139"
down_revision = "0138"
branch_labels = None
depends_on = None

# As link_topic (0118). `commands`: of a topic that several readers are allowed by name, one has the commands.
ALLOWED = r"""
CREATE TABLE link_allowed (
    link     bigint NOT NULL,
    topic    text   COLLATE "C" NOT NULL CONSTRAINT link_allowed_topic CHECK (octet_length(topic) <= 200 AND (
        topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'
        OR topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$')),
    commands boolean NOT NULL DEFAULT false CHECK (NOT commands OR fits IS NULL),
    fits     text COLLATE "C" GENERATED ALWAYS AS (CASE WHEN topic ~ '[*#]' THEN translate(
        regexp_replace(topic, '([\\_%])', '\\\1', 'g') || CASE WHEN topic ~ '#$' THEN '' ELSE '.' END, '*#', '%%')
        END) STORED,
    words    integer GENERATED ALWAYS AS (
        CASE WHEN topic ~ '[*]' THEN cardinality(string_to_array(topic, '.')) END) STORED,
    PRIMARY KEY (link, topic)
)
"""
ONE_RECEIVER = "CREATE UNIQUE INDEX link_allowed_commands ON link_allowed (topic) WHERE commands"
COMMANDS = "ALTER TABLE link_topic ADD commands boolean NOT NULL DEFAULT false"

# A pattern is allowed by one that fits all that it fits: as in `mailroom.routing`, with the pattern for a topic. A # at
# the end may be any number of words, so a pattern with * fits not all of it.
ALLOWS = """
CREATE FUNCTION link_allows(of_link bigint, of_topic text) RETURNS boolean LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN (
    SELECT CASE WHEN count(*) = 0 THEN false
                WHEN bool_or(a.topic = of_topic OR of_topic || '.' LIKE a.fits AND (
                    a.words IS NULL OR a.words = cardinality(string_to_array(of_topic, '.')) AND of_topic !~ '#'))
                THEN bool_or(a.topic = of_topic AND a.commands) END
    FROM link_allowed AS a WHERE a.link = of_link)
"""
# With its owner's rights: readers need none on what other readers are allowed. Without limits all is allowed, so limits
# that row security hides from the owner are an error. What is not allowed is passed over and not refused, so that the
# reader gets the rest, and sees what is missing.
ASKED = """
CREATE FUNCTION link_topic_asked() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    new.commands := {schema}.link_allows(new.link, new.topic);
    RETURN CASE WHEN new.commands IS NOT NULL THEN new END;
END $$
"""
TRIGGER = "CREATE TRIGGER zz_asked BEFORE INSERT ON link_topic FOR EACH ROW EXECUTE FUNCTION link_topic_asked()"

COMMENTS = {
    "TABLE link_allowed": "What a reader may ask for; without rows all messages and events.",
    "COLUMN link_allowed.link": "The link.",
    "COLUMN link_allowed.topic": "The topic, or a pattern of topics, as in subscription.",
    "COLUMN link_allowed.commands": "Whether commands and replies of it go to this reader, if to no inbox here.",
    "COLUMN link_allowed.fits": "Of a pattern: what a topic with a dot behind it must be LIKE.",
    "COLUMN link_allowed.words": "Of a pattern with *: how many words the topic must have.",
    "COLUMN link_topic.commands": "Whether the reader gets commands and replies of it, too, if no inbox here does.",
    "FUNCTION link_allows(bigint, text)": "Whether a link that asks for this gets commands, too; null for nothing.",
    "FUNCTION link_topic_asked()": "Passes over what the link is not allowed, and sets commands.",
}


def upgrade() -> None:
    schema = op.get_context().version_table_schema
    for statement in (ALLOWED, ONE_RECEIVER, COMMANDS, ALLOWS, ASKED.replace("{schema}", f'"{schema}"'), TRIGGER):
        op.execute(statement)
    op.execute("REVOKE ALL ON FUNCTION link_topic_asked() FROM PUBLIC")
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute("DROP TRIGGER zz_asked ON link_topic")
    op.execute("DROP FUNCTION link_topic_asked(), link_allows(bigint, text)")
    op.execute("ALTER TABLE link_topic DROP commands")
    op.execute("DROP TABLE link_allowed")
