"""What a source answers its readers, whose roles see no more of it than it lets them."""

from alembic import op

revision = "0130"
down_revision = "0129"
branch_labels = None
depends_on = None

# A policy may hide rows of transit from a reader's role, which would look as if nothing had been sent, or as if the
# source had lost it. So the reader holds what it sees against what there is, in one snapshot. With a bound body: its
# names mean what they mean here, whatever search_path and names come later.
NEXT = """
CREATE FUNCTION link_next(of_link bigint, behind bigint) RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
RETURN (SELECT t.seq FROM transit AS t WHERE t.link = of_link AND t.seq > behind ORDER BY t.seq LIMIT 1)
"""
COMMENTS = {
    "FUNCTION link_next(bigint, bigint)": "The next seq of a link, whatever policies hide; for the roles of readers.",
}


def upgrade() -> None:
    op.execute(NEXT)
    op.execute("REVOKE ALL ON FUNCTION link_next(bigint, bigint) FROM PUBLIC")
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute("DROP FUNCTION link_next(bigint, bigint)")
