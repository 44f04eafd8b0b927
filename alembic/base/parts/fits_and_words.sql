-- Computed where a pattern is stored, by whomever: also by an INSERT by hand. What means something to LIKE is escaped. A
    -- dot is put behind the topic that is compared, so that 'order.' is there for order.# to fit order itself.
    fits text COLLATE "C" GENERATED ALWAYS AS (  -- Of a pattern: what a topic with a dot after it must be LIKE.
        CASE WHEN topic ~ '[*#]' THEN translate(regexp_replace(topic, '([\\_%])', '\\\1', 'g')
                                                || CASE WHEN topic ~ '#$' THEN '' ELSE '.' END, '*#', '%%') END) STORED,
    words integer GENERATED ALWAYS AS (  -- Of a pattern with *: how many words the topic must have.
        CASE WHEN topic ~ '[*]' THEN cardinality(string_to_array(topic, '.')) END) STORED
