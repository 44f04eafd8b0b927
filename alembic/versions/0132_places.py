"""Where a node was made is noted, links or none; and of what a source has sent, by which earlier link it came."""

from alembic import op

revision = "0132"
down_revision = "0131"
branch_labels = None
depends_on = None

# As `mailroom.links.place` reads it. A node that has given out clocks does not know where that was: its clock jumps at
# its next start. Of a server that hides its control file, only the start's time is known.
NEW = """
    WHERE d.datname = current_database() AND system_id IS NULL AND clock_ceiling = 0
      AND (SELECT last_value FROM clock) = 0"""
PLACE = f"""
DO $$
BEGIN
    UPDATE node SET system_id = c.system_identifier, database_oid = d.oid::bigint,
        timeline = ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint,
        started_at = pg_postmaster_start_time()
    FROM pg_control_system() AS c, pg_database AS d{NEW};
EXCEPTION WHEN insufficient_privilege OR feature_not_supported THEN
    UPDATE node SET system_id = 0, database_oid = d.oid::bigint, timeline = 0, started_at = pg_postmaster_start_time()
    FROM pg_database AS d{NEW};
END $$
"""
COMMENTS = {
    "TABLE known": "Messages that a source may send again though they were received. They are not taken twice.",
    "COLUMN known.link": "The earlier link by which it came; null: it is of a history which the source has lost.",
}


def upgrade() -> None:
    op.execute("ALTER TABLE known ADD link bigint")
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")
    op.execute(PLACE)


def downgrade() -> None:
    op.execute("ALTER TABLE known DROP link")
    op.execute(
        "COMMENT ON TABLE known IS "
        "'Messages that were received from a history which the origin has lost. They are not taken twice.'"
    )
