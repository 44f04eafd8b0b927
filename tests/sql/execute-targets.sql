-- TARGETS in dispatcher/executor/targets/target.py
-- $1 keys, $2 values, $3 numbers, $4 names
SELECT e.name, e.table_schema, e.table_name, e.key_column, e.value_column, e.number_column,
       kt.typname::text, vt.typname::text, nt.typname::text,
       k.attnum IS NOT NULL AND coalesce(kt.typname::text = ANY($1::text[]), false)
       AND (k.attcollation = 0::oid OR EXISTS (SELECT FROM pg_catalog.pg_collation AS l
                                               WHERE l.oid = k.attcollation AND l.collisdeterministic))
       AND (e.value_column IS NULL OR coalesce(vt.typname::text = ANY($2::text[]), false))
       AND (e.number_column IS NULL OR coalesce(nt.typname::text = ANY($3::text[]), false))
       AND (c.relkind = 'v' OR EXISTS (SELECT FROM pg_catalog.pg_index AS i
                                       WHERE i.indrelid = c.oid AND i.indkey::text = k.attnum::text AND i.indisunique
                                         AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL)),
       c.relkind <> 'r' OR c.relhasrules OR c.relrowsecurity OR c.relhassubclass OR c.relispartition
       OR k.atttypmod <> -1 OR coalesce(v.atttypmod <> -1 OR v.attnotnull, false)
       OR EXISTS (SELECT FROM pg_catalog.pg_trigger AS t
                  WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D')
       OR EXISTS (SELECT FROM pg_catalog.pg_constraint AS o
                  WHERE o.conrelid = c.oid AND o.contype IN ('c', 'x', 'f', 't')
                     OR o.confrelid = c.oid AND o.contype = 'f')
       OR EXISTS (SELECT FROM pg_catalog.pg_index AS i
                  WHERE i.indrelid = c.oid
                    AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL OR v.attnum = ANY(i.indkey)
                         OR i.indisunique AND i.indkey::text <> k.attnum::text))
       OR EXISTS (SELECT FROM pg_catalog.pg_attribute AS a
                  JOIN pg_catalog.pg_type AS y ON y.oid = a.atttypid
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND (a.attgenerated <> '' OR y.typtype = 'd'
                         OR a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
                            AND a.attname NOT IN (e.key_column::name)
                            AND a.attname IS DISTINCT FROM e.number_column::name))
FROM "mailroom".executable_target AS e
LEFT JOIN pg_catalog.pg_namespace AS s ON s.nspname = e.table_schema::name
LEFT JOIN pg_catalog.pg_class AS c ON c.relnamespace = s.oid AND c.relname = e.table_name::name
LEFT JOIN pg_catalog.pg_attribute AS k ON k.attrelid = c.oid AND k.attname = e.key_column::name AND NOT k.attisdropped
LEFT JOIN pg_catalog.pg_attribute AS v ON v.attrelid = c.oid AND v.attname = e.value_column::name AND NOT v.attisdropped
LEFT JOIN pg_catalog.pg_attribute AS n
       ON n.attrelid = c.oid AND n.attname = e.number_column::name AND NOT n.attisdropped
LEFT JOIN pg_catalog.pg_type AS kt ON kt.oid = k.atttypid AND kt.typnamespace = 'pg_catalog'::regnamespace::oid
LEFT JOIN pg_catalog.pg_type AS vt ON vt.oid = v.atttypid AND vt.typnamespace = 'pg_catalog'::regnamespace::oid
LEFT JOIN pg_catalog.pg_type AS nt ON nt.oid = n.atttypid AND nt.typnamespace = 'pg_catalog'::regnamespace::oid
WHERE e.name = ANY($4::text[])
