"""The expressions by which inboxes are read in their order: their indexes are on these, and statements go by them.

An index on the plain column could be used for both this and the search for a key. While an inbox is small, the planner
would choose it to find a key, and that cached plan would later scan the whole inbox. Seen on PostgreSQL 15 and 18.
"""

# The index on this finds the oldest messages of an inbox; the primary key (key, clock) finds those of a key.
BY_CLOCK = "(clock + 0)"
# Total inboxes have a second index, on this and the origin: the order in which they are reaped. Clocks rise with it for
# the messages of one origin only.
BY_SENT = "(sent_clock + 0)"
