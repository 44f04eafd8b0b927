-- Which inboxes get a message, and the messages for more inboxes than one transaction may lock.

-- One that is ended and made again is another one, of which the source has to be told anew. No sequence gives the id,
-- since one that is set back would give it twice.
CREATE TABLE subscription (  -- Which inbox gets which topic, beside the inbox of the topic's own name.
    topic  text   COLLATE "C" NOT NULL  -- The topic, or a pattern of topics: * is one word, a last word # any number of words.
        CONSTRAINT subscription_topic CHECK ({is_topic_or_pattern}),
    inbox  text   COLLATE "C" NOT NULL,                -- The inbox that gets it.
    {fits_and_words},
    origin text   COLLATE "C" NOT NULL DEFAULT ''      -- Whose messages: empty for this node, a name of origin, or * for this node and all origins.
        CONSTRAINT subscription_origin CHECK (origin ~ '^([A-Za-z][A-Za-z0-9_.-]{0,62}|[*]|)$'),
    since  bigint NOT NULL DEFAULT 0,                  -- Only messages with a later sent_clock.
    id     uuid   NOT NULL DEFAULT gen_random_uuid(),  -- Which subscription it is: another one when one is ended and made again.
    PRIMARY KEY (topic, inbox, origin)
);
-- All that a delivery reads of patterns, and what it finds empty where there are none.
CREATE INDEX subscription_pattern ON subscription (fits, words, inbox, origin, since) WHERE fits IS NOT NULL;

-- Filled and emptied at once, so vacuumed early.
CREATE TABLE fan_out (  -- Messages that have their clocks and left the outbox, and that not all of their inboxes have yet.
    clock        bigint      PRIMARY KEY,  -- The clock at which it was stamped or received here.
    sent_clock   bigint      NOT NULL,     -- The clock at which it was stamped at its origin.
    origin       uuid        NOT NULL,     -- The id of the node that stamped it first.
    {message}
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
COMMENT ON COLUMN fan_out.expires_at IS 'If not received before this time, the message is dropped.';

CREATE TABLE fan_out_way (  -- The inboxes that have not got what is in fan_out yet; nothing else is delivered before.
    inbox          text   COLLATE "C" NOT NULL,  -- The inbox.
    topic          text   COLLATE "C" NOT NULL,  -- The topic.
    messages_after bigint,                       -- It gets messages with a sent_clock above this; null for none.
    events_after   bigint,                       -- The same for events.
    others_after   bigint,                       -- The same for commands and replies.
    PRIMARY KEY (inbox, topic)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
