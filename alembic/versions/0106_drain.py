"""Drains of inboxes into files: the progress of each lane."""

from alembic import op

revision = "0106"
down_revision = "0105"
branch_labels = None
depends_on = None

DRAIN = """
CREATE TABLE spark_drain (
    inbox     text COLLATE "C" NOT NULL,
    lane      integer NOT NULL CHECK (lane BETWEEN 0 AND 999),
    epoch     bigint NOT NULL DEFAULT 0,
    file      text,
    directory text NOT NULL,
    finished  boolean NOT NULL DEFAULT true,
    messages  bigint NOT NULL DEFAULT 0,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (inbox, lane)
)
"""

COMMENTS = {
    None: "How far inboxes have been drained into files: a row per lane, locked by the drainer of the lane.",
    "inbox": "The inbox.",
    "lane": "The number of the drain, of those that run side by side.",
    "epoch": "The last epoch: one transaction and one file with its messages.",
    "file": "The hidden name of that file before it is finished.",
    "directory": "The directory of that file.",
    "finished": "Whether the file has its final name. If not, the next drain renames it.",
    "messages": "How many messages the lane has drained in total.",
    "at": "When the last epoch was committed.",
}


def upgrade() -> None:
    op.execute(DRAIN)
    for column, text in COMMENTS.items():
        what = "TABLE spark_drain" if column is None else f"COLUMN spark_drain.{column}"
        op.execute(f"COMMENT ON {what} IS '{text.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    op.execute("DROP TABLE spark_drain")
