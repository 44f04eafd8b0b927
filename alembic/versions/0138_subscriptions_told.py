"""Which subscriptions the sources of this node have been told of: from then on, what is sent there comes."""

from alembic import op

revision = "0138"
down_revision = "0137"
branch_labels = None
depends_on = None

# One that is ended and made again is another one, of which the source has to be told anew. No sequence gives the id,
# since one that is set back would give it twice.
ID = "ALTER TABLE subscription ADD id uuid NOT NULL DEFAULT gen_random_uuid()"
TOLD = "ALTER TABLE origin ADD told uuid[] NOT NULL DEFAULT '{}', ADD refused uuid[] NOT NULL DEFAULT '{}'"
COMMENTS = {
    "subscription.id": "Which subscription it is: another one when one is ended and made again.",
    "origin.told": "The subscriptions that the source has, by their ids.",
    "origin.refused": "The subscriptions that the source was told of and does not allow.",
}


def upgrade() -> None:
    op.execute(ID)
    op.execute(TOLD)
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{text}'")


def downgrade() -> None:
    op.execute("ALTER TABLE origin DROP told, DROP refused")
    op.execute("ALTER TABLE subscription DROP id")
