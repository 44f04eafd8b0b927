"""How an in-flight entry finds its first message (`inbox.worker.in_flight`): pieces of SQL, which an order has."""

# Of a row `w` of `my_worker`, with the key and the clock of its first message. `holder` gives the transaction that has
# the message, `found` its id unless a transaction has it, and `is_gone` says whether it was consumed.
# (SELECT ...) IS NULL stays an index probe; NOT EXISTS may be planned as a full scan.
BY_ROW = {
    "holder": """{schema}.inbox_{inbox}
            WHERE key = (%(keys)s::text[])[1] AND clock = (%(clocks)s::bigint[])[1] AND xmax <> '0'""",
    "found": """
        SELECT message_id FROM {schema}.inbox_{inbox} AS i WHERE i.key = w.key AND i.clock = w.clock
        FOR UPDATE SKIP LOCKED""",
    "is_gone": "(SELECT clock FROM {schema}.inbox_{inbox} AS i WHERE i.key = w.key AND i.clock = w.clock) IS NULL",
}
