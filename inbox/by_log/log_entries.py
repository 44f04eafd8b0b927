"""How an in-flight entry finds its first message: by its row if it was diverted, else by the lock on its lane.

See `inbox.by_key.entries`. A position that is read in the statement that takes the lock may be old: whoever blames a
message looks again (`inbox.by_log.log_failure`).
"""

from inbox.by_key.entries import BY_ROW

POSITION = """(SELECT r.clock FROM {schema}.receipts_{inbox} AS r
            WHERE r.lane = {schema}.lane_of(w.key, {lanes}) ORDER BY r.epoch DESC, r.clock DESC LIMIT 1)"""
BY_LANE = {
    "holder": f"""(
            SELECT xmax FROM {BY_ROW["holder"]}
            UNION ALL SELECT xmax FROM {{schema}}.lanes_{{inbox}}
            WHERE lane = {{schema}}.lane_of((%(keys)s::text[])[1], {{lanes}}) AND xmax <> '0'
            LIMIT 1) AS held""",
    "found": f"""
        SELECT message_id FROM ({BY_ROW["found"]}) AS i
        UNION ALL SELECT o.message_id FROM (
            SELECT l.lane FROM {{schema}}.lanes_{{inbox}} AS l
            WHERE l.lane = {{schema}}.lane_of(w.key, {{lanes}}) AND w.clock > {POSITION}
              AND {BY_ROW["is_gone"]} FOR UPDATE SKIP LOCKED) AS l, LATERAL (
            SELECT message_id FROM {{schema}}.log_{{log}} AS o WHERE o.lane = l.lane AND o.clock = w.clock) AS o""",
    "is_gone": f"({BY_ROW['is_gone']} AND w.clock <= {POSITION})",
}
