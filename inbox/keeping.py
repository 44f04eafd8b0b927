"""Inboxes that keep what is reaped: their claims write it into the archive, in the statement that takes it.

So it is there if and only if the transaction of the claim commits, and no row passes through Python. What an operator
discards from such an inbox is written there too, in the statement that deletes it, and marked. Only the text for
such an inbox has that part: others pay for one comparison. A claim takes nothing if its text is not the one for the
setting that its snapshot sees, says so, and is repeated with the other text. So a claim that began before the setting
was changed may still go by the old one, as with a pause.
"""

from mailroom.message.columns import DELIVERED
from mailroom.sql.operation import filled

KEEPS = "keep_reaped_days IS NOT NULL"
# Whether the text of a statement fits the row of `inbox_registry`; see `keeping`.
# D-reap-15: Two texts per claim, with and without the archive.
FITS = "keep_reaped_days {keeps}"
# A view, which refuses rows of other inboxes. The last day that has a partition counts, if the one that is wanted has
# none: a reap does not fail because no daemon has made it.
ARCHIVED = filled(
    """,
archived AS (
    INSERT INTO {schema}.my_reaped ({delivered}, drop_on{mark})
    SELECT {delivered}, (
        SELECT d.day FROM {schema}.inbox_registry AS r, {schema}.reaped_day AS d
        WHERE r.name = '{inbox}' AND d.emptied_at IS NULL
          AND d.day <= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 1
        ORDER BY d.day DESC LIMIT 1){marked}
    FROM gone{but})""",
    delivered=DELIVERED,
)


def keeping(keeps: bool, but: str = "") -> dict[str, str]:
    """Return the names for a claim's text: of an inbox that keeps what is reaped, or of one that does not.

    `but` is a condition on what is archived of `gone`. Fill these in before the schema and the inbox.
    """
    if not keeps:
        return {"keeps": "IS NULL", "archived": ""}
    return {"keeps": "IS NOT NULL", "archived": filled(ARCHIVED, but=but and f" WHERE {but}", mark="", marked="")}


# A discard is rare, so it has one text: it opens the archive also where nothing goes into it.
# D-reap-20: What is discarded from an inbox with an archive goes there.
DISCARDED = filled(
    ARCHIVED,
    but=f" WHERE EXISTS (SELECT FROM {{schema}}.inbox_registry WHERE name = '{{inbox}}' AND {KEEPS})",
    mark=", discarded",
    marked=", true",
)
