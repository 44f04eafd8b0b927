"""Failed attempts at messages of a log, recorded as those of an inbox by key (`inbox.by_key.failure`).

A message that fails stands in the log, or in the inbox's own table if its key had failed before. While its batch has
the lane, the position of the lane is before the message.
"""

from inbox.by_key.failure import DECIDED, RECORDED, RECORDER, SUSPECTED, TRIED
from mailroom.registry.log_topics import IS_WANTED
from mailroom.sql.operation import Sql, filled

# The position of the lane of a key.
POSITION = """(SELECT r.clock FROM {schema}.receipts_{inbox} AS r
       WHERE r.lane = {schema}.lane_of({key}, {lanes}) ORDER BY r.epoch DESC, r.clock DESC LIMIT 1)"""
OF_KEY = filled(POSITION, key="%(key)s::text")
WAITS = "EXISTS (SELECT FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text AND clock = %(clock)s::bigint)"
# Not what waits for its turn after another message of its key, in the same batch.
IS_FIRST = f"""NOT EXISTS (SELECT FROM {{schema}}.inbox_{{inbox}}
                       WHERE key = %(key)s::text AND clock < %(clock)s::bigint)
           AND NOT EXISTS (SELECT FROM {{schema}}.log_{{log}} AS o
                           WHERE o.lane = {{schema}}.lane_of(%(key)s::text, {{lanes}}) AND o.clock > {OF_KEY}
                             AND o.clock < %(clock)s::bigint AND o.key = %(key)s::text
                             AND {IS_WANTED})"""
RECORD = Sql(
    TRIED,
    columns=RECORDED,
    decided=DECIDED,
    recorder=RECORDER,
    is_head=f"({IS_FIRST})",
    is_there=f"(%(clock)s::bigint > {OF_KEY} OR {WAITS})",
)
SUSPECT = Sql(
    SUSPECTED,
    is_there=f"""(u.clock > {filled(POSITION, key="u.key")}
       OR EXISTS (SELECT FROM {{schema}}.inbox_{{inbox}} AS i WHERE i.key = u.key AND i.clock <= u.clock))""",
)
# A message that stands in the log or in the inbox's own table.
THERE = f"""(SELECT %(key)s::text AS key, %(clock)s::bigint AS clock WHERE %(clock)s::bigint > {OF_KEY} OR {WAITS})"""
