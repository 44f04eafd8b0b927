"""How many partitions one transaction may use, so that the server's table of locks has room for others too."""

# A quarter of the server's locks, at eight each: the table, its indexes, its TOAST table, the lock "asleep", and some
# for users' own indexes. %(partitions)s is what a caller wants, null for this.
PARTITIONS = """coalesce(%(partitions)s::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32))"""
