-- What became of messages whose handler failed, and who acted on them by hand.

CREATE TABLE key_state (  -- The failing keys: those with a message whose last attempt failed, or that was in a batch that failed. And the paused ones.
    inbox      text        COLLATE "C" NOT NULL,  -- The inbox.
    key        text        COLLATE "C" NOT NULL,  -- The key.
    clock      bigint      NOT NULL,              -- Clock of the message that failed last.
    attempts   integer     NOT NULL,              -- How often that message failed; 0 if only its batch failed.
    retry_at   timestamptz NOT NULL,              -- The key waits until this time, infinity while it is parked or paused. Other keys go on.
    last_error text,                              -- The last failure, truncated.
    parked_at  timestamptz,                       -- Since when the key is parked: its messages wait, in order, in `parked` until an operator acts.
    alone_to   bigint      NOT NULL DEFAULT 0,    -- Up to this clock the key is claimed by itself, and keeps this row.
    suspect_to bigint      NOT NULL DEFAULT 0,    -- Up to this clock the key is tried one message at a time.
    paused_at  timestamptz,                       -- Since when the key is paused; null if it is not.
    paused_by  text,                              -- Who paused it, and why.
    deleted    boolean     NOT NULL DEFAULT false,  -- Set to have the row deleted (delete_marked).
    resume_at  timestamptz,                       -- What retry_at would be if the key were not paused; null if the key is healthy.
    PRIMARY KEY (inbox, key)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
CREATE INDEX key_state_due ON key_state (inbox, retry_at, key);

-- VOLATILE, so that it has a snapshot of its own: a claim calls it after locking the keys, and the snapshot of the
-- claim may be older than the locks. In PL/pgSQL, which caches the plan; an SQL function would be planned for each
-- claim. Key by key: no single plan is right both for few failing keys and for many. Entries are read only if a key was
-- locked before, which is rare: there may be many dead versions of them.
-- D-reap-9: A claim asks again after it has the locks.
CREATE FUNCTION failing_keys(of_inbox text, of_keys text[], of_tried text[] DEFAULT '{}', but uuid[] DEFAULT '{}')  -- Which of these keys are failing, or orphaned if tried.

RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- Mostly no key of the inbox is failing: one look says so for all of them.
    IF EXISTS (SELECT FROM {schema}.my_key_state AS s WHERE s.inbox = of_inbox) THEN
        RETURN QUERY SELECT n.key, n.retry_at FROM pg_catalog.unnest(of_keys) AS k (key), LATERAL (
            SELECT s.key, s.retry_at FROM {schema}.my_key_state AS s
            WHERE s.inbox = of_inbox AND s.key = k.key OFFSET 0) AS n;
    END IF;
    IF of_tried <> '{}' THEN
        RETURN QUERY SELECT o.key, 'infinity'::timestamptz FROM {schema}.orphaned_keys(of_inbox, but) AS o (key)
                     WHERE o.key = ANY (of_tried);
    END IF;
END $$;

CREATE TABLE attempt (  -- The history of failed attempts and of replays, kept for a while; attempts are counted from it.
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- Its number.
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When it was recorded.
    inbox       text        COLLATE "C" NOT NULL,  -- The inbox.
    key         text        COLLATE "C" NOT NULL,  -- The key.
    clock       bigint      NOT NULL,              -- The message's clock in the inbox.
    message_id  uuid        NOT NULL,              -- The message.
    attempt     integer     NOT NULL,              -- The number of the attempt, from 1; 0 for a replay.
    outcome     text        COLLATE "C" NOT NULL,  -- The outcome: retry, park, skip or replay.
    error       text        NOT NULL,              -- Why it failed, truncated.
    worker      text        NOT NULL DEFAULT current_setting('application_name'),  -- The worker that recorded it: its application_name, process id and host.
    retry_at    timestamptz,                       -- When the message may be tried again; null if it may not.
    error_class text        COLLATE "C"            -- The class of what was raised, or of what is known of it; null for a replay.
);
-- With (inbox, key, clock) alone, a plan may search the last attempt of a message from the end of the whole history.
CREATE INDEX attempt_key ON attempt (inbox, key, clock, id);
CREATE INDEX attempt_at ON attempt (at);

CREATE TABLE parked (  -- Messages of parked keys, with the clocks they had; replayed in that order.
    LIKE inbox INCLUDING DEFAULTS INCLUDING COMMENTS,
    PRIMARY KEY (inbox, key, clock)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE dead_letter (  -- Where single messages end that cannot be delivered.
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- The number of the dead letter.
    failed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When it was inserted.
    stage        text        COLLATE "C" NOT NULL,  -- Where it failed.
    reason       text        NOT NULL,              -- Why.
    {message},
    inbox        text        COLLATE "C",           -- The inbox in which it was skipped; null if it was never delivered.
    clock        bigint,                            -- Its clock in that inbox.
    attempts     integer,                           -- How often it was tried in that inbox.
    origin       uuid,                              -- The node that sent it; null for this one.
    sent_clock   bigint,                            -- Its clock there.
    bridge       text        COLLATE "C"            -- The bridge that could not publish it, or by which it came; null for none.
);

CREATE TABLE audit (  -- Who changed what by hand, and what the dispatcher did of its own accord.
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- Its number.
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When.
    actor    text        NOT NULL,                       -- Who acted, as given by the caller.
    role     text        NOT NULL DEFAULT session_user,  -- The database role that did it.
    action   text        COLLATE "C" NOT NULL,           -- What was done, by the words of the command; those of the dispatcher alone begin with its name.
    inbox    text        COLLATE "C",                    -- In which inbox.
    key      text        COLLATE "C",                    -- To which key, link, bridge, table or other thing of a name; null if to none.
    messages bigint      NOT NULL,                       -- How many messages it affected.
    change   text,                                       -- What is different now, such as: rate 5 -> 10.
    reason   text                                        -- Why, as given by the caller.
);
CREATE INDEX audit_at ON audit (at);
