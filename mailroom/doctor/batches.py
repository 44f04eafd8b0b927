"""Large batches of Spark that are decided, and of which nothing has moved for long."""

from typing import NamedTuple

from mailroom.doctor.finding import DoctorCheck, Examination, Found
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import shown
from mailroom.values.shell import quoted


class _Stuck(NamedTuple):
    name: str
    batch: int
    left: int
    messages: int
    age: str
    gone: str | None


# By names, since to_regclass asks for a right on the schema. A table is dropped after its part is done, so a batch that
# moves may lose one while this looks: then `at` is not old.
STUCK = Sql(
    """
SELECT b.name, b.batch, b.messages - b.moved, b.messages,
       date_trunc('second'::text, clock_timestamp() - b.at)::text, s.relation
FROM {schema}.spark_bulk AS b LEFT JOIN LATERAL (
    SELECT p.relation FROM (
        SELECT part, coalesce(schema, '{node}') AS place, 'staging_' || replace(token::text, '-', '') AS relation
        FROM {schema}.spark_staging WHERE name = b.name AND batch = b.batch AND part IS NOT NULL) AS p
    WHERE NOT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                      WHERE n.nspname = p.place::name AND c.relname = p.relation::name)
    ORDER BY p.part LIMIT 1) AS s ON true
WHERE b.at <= clock_timestamp() - %(bulk_s)s::float8 * interval '1 s'
ORDER BY s.relation IS NULL, b.at
""",
    into=_Stuck,
)


def stuck(look: Examination) -> Operation[Found]:
    """Return large batches of which nothing has moved for long, first those of which a table is gone."""
    found: Found = []
    asked = STUCK.at(schema=look.schema, node=look.schema)(bulk_s=look.limits.bulk_s)
    stuck_batches: list[_Stuck] = STUCK.named((yield asked))
    for each in stuck_batches:
        what = f"job {shown(each.name)}" if each.batch < 0 else f"batch {each.batch} of {shown(each.name)}"
        line = f"{what}: {each.left:,} of {each.messages:,} messages are left, and none was moved for {each.age}"
        if each.gone is None:
            found.append((f"mailroom dispatcher run --schema {look.schema}", line))
        else:
            give_up = f"python -m spark_jobs.sweep --give-up {quoted(each.name)} --schema {look.schema}"
            found.append((give_up, f"{line}: table {each.gone} is gone"))
    return found


CHECKS = (DoctorCheck("M051", stuck, "{first}", of_tables=True),)
