"""The sequences, which give rows their order, and the clock."""

from mailroom.doctor.finding import FOUND, DoctorCheck, Examination, Found, asking
from mailroom.order.clock import WARN_CLOCK
from mailroom.sql.operation import Operation, Sql

BEHIND = Sql(
    """
SELECT b."table", pg_catalog.format('%%s.%%s: a row has %%s, and the sequence is behind it', b."table", b."column",
    b.highest)
FROM {schema}.sequences_behind() AS b
""",
    columns=FOUND,
)
# With a cache each session has a range of its own, so what commits first may have a later number.
SETTINGS = Sql(
    """
SELECT c.oid::regclass::text, pg_catalog.format('%%s: CACHE %%s, INCREMENT %%s%%s', c.oid::regclass, s.seqcache,
    s.seqincrement,
       CASE WHEN s.seqcycle THEN ', CYCLE' END)
FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid
WHERE c.relnamespace = '{schema}'::regnamespace AND (s.seqcache <> 1 OR s.seqincrement <> 1 OR s.seqcycle)
ORDER BY 1
""",
    columns=FOUND,
)
USED_UP = Sql(
    """
SELECT c.oid::regclass::text, pg_catalog.format('%%s: %%s of %%s', c.oid::regclass, l.value, s.seqmax)
FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid,
     LATERAL (SELECT pg_sequence_last_value(c.oid::regclass) AS value) AS l
WHERE c.relnamespace = '{schema}'::regnamespace AND c.relname <> 'clock'::name
  AND l.value::float8 >= s.seqmax::float8 * %(sequence_share)s::float8
ORDER BY 1
""",
    columns=FOUND,
)
CLOCK = Sql("SELECT c.last_value, n.clock_ceiling FROM {schema}.clock AS c, {schema}.node AS n", ("bigint", "bigint"))
CEILING = Sql("SELECT clock_ceiling FROM {schema}.node", ("bigint",))
NEAR_THE_END = Sql(
    """
SELECT '', pg_catalog.format('clock %%s, ceiling %%s, the last clock there is: 9223372036854775807', c.last_value,
    n.clock_ceiling)
FROM {schema}.clock AS c, {schema}.node AS n
WHERE greatest(c.last_value, n.clock_ceiling) > %(warn_clock)s::bigint
""",
    columns=FOUND,
)


def above_ceiling(look: Examination) -> Operation[Found]:
    """Return the clock if it is above its ceiling.

    A sequence is read as it is now, and a row as of the statement's snapshot: a ceiling that is raised in between is
    seen by the second statement only.
    """
    found: Found = []
    for clock, _ in (each for each in (yield CLOCK.at(schema=look.schema)()) if each[0] > each[1]):
        for (ceiling,) in (yield CEILING.at(schema=look.schema)()):
            if clock > ceiling:
                found.append(("", f"clock {clock}, ceiling {ceiling}"))
    return found


CHECKS = (
    DoctorCheck("M017", asking(BEHIND), "mailroom migrate --schema {schema}", of_tables=True),
    DoctorCheck("M018", asking(SETTINGS), "ALTER SEQUENCE {first} CACHE 1 INCREMENT 1 NO CYCLE;"),
    DoctorCheck("M019", asking(USED_UP), "ALTER SEQUENCE {first} AS bigint NO MAXVALUE;"),
    DoctorCheck("M020", above_ceiling, "mailroom dispatcher run --schema {schema}", of_tables=True),
    DoctorCheck(
        "M021", asking(NEAR_THE_END, warn_clock=WARN_CLOCK), "mailroom status --schema {schema}", of_tables=True
    ),
)
