"""Large batches of Spark that are decided, and of which nothing has moved for long."""

from mailroom.doctor.finding import DoctorCheck, Found, Limits
from mailroom.names import shown
from mailroom.shell import quoted
from mailroom.sql.operation import Operation, Sql

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
    columns=("text", "bigint", "bigint", "bigint", "text", "text"),
)


def stuck(schema: str, limits: Limits) -> Operation[Found]:
    """Return large batches of which nothing has moved for long, first those of which a table is gone."""
    found: Found = []
    for name, batch, left, messages, age, gone in (yield STUCK.at(schema=schema, node=schema)(bulk_s=limits.bulk_s)):
        what = f"job {shown(name)}" if batch < 0 else f"batch {batch} of {shown(name)}"
        line = f"{what}: {left:,} of {messages:,} messages are left, and none was moved for {age}"
        if gone is None:
            found.append((f"mailroom dispatcher run --schema {schema}", line))
        else:
            give_up = f"python -m spark_jobs.sweep --give-up {quoted(name)} --schema {schema}"
            found.append((give_up, f"{line}: table {gone} is gone"))
    return found


CHECKS = (DoctorCheck("M051", stuck, "{first}", of_tables=True),)
