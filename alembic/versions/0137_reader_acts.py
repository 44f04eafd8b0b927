"""What a reader may do to its source's clock and history: by functions, which know whose link it is, and how far."""

from alembic import op

revision = "0137"
down_revision = "0136"
branch_labels = None
depends_on = None

COLUMN = """
ALTER TABLE link
    ADD by_role text,
    DROP CONSTRAINT link_wanted_clock_check,
    ADD CONSTRAINT link_wanted_clock_check CHECK (wanted_clock >= 0)
"""
# Whoever may write a run into a link has the link: a policy says whose it is. The functions below run as the owner, on
# whom no policy is binding, and ask for the same login.
GREETED = """
CREATE FUNCTION greeted() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    new.by_role := session_user;
    RETURN new;
END $$
"""
GREETED_TRIGGER = """
CREATE TRIGGER greeted BEFORE INSERT OR UPDATE OF run ON link FOR EACH ROW
WHEN (new.run IS NOT NULL) EXECUTE FUNCTION greeted()
"""
# A reader that wants a clock further ahead asks again when it has seen this one, and so gets there in steps. What it
# has received cannot be shortened so: the clock goes beyond all of it, or nothing is claimed.
BOUND = """
CREATE FUNCTION bound_reader() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    reach CONSTANT bigint := {schema}.clock_reach();
BEGIN
    IF new.claim_clock > reach THEN
        RAISE check_violation USING
            MESSAGE = format('claim_clock %s is more than 2^32 beyond the clock of this node', new.claim_clock),
            HINT = 'If this node has lost such clocks, let it go on behind them: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'claim_clock', CONSTRAINT = 'link_claim_clock';
    END IF;
    new.wanted_clock := least(new.wanted_clock, reach);
    RETURN new;
END $$
"""
BOUND_TRIGGER = """
CREATE TRIGGER bounded BEFORE INSERT OR UPDATE OF wanted_clock, claim_clock ON link FOR EACH ROW
WHEN (new.wanted_clock > 4294967296 OR new.claim_clock > 4294967296) EXECUTE FUNCTION bound_reader()
"""
# Each returns whether it changed anything, and null if another daemon or login has the link.
ACT = """
CREATE FUNCTION {name} RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    {act}
    IF FOUND THEN
        RETURN true;
    END IF;
    RETURN (SELECT false FROM {schema}.link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$
"""
HELD = "l.number = of_link AND l.run = by_run AND l.by_role = session_user"
ACTS = {
    "link_want(of_link bigint, by_run uuid, clock bigint)": f"""
    UPDATE {{schema}}.link AS l SET wanted_clock = clock
    WHERE {HELD} AND l.wanted_clock < least(clock, {{schema}}.clock_reach());""",
    "link_claim(of_link bigint, by_run uuid, seq bigint, clock bigint)": f"""
    UPDATE {{schema}}.link AS l SET claim_seq = seq, claim_clock = clock
    WHERE {HELD} AND (l.claim_seq, l.claim_clock) IS DISTINCT FROM (seq, clock);""",
    "link_match(of_link bigint, by_run uuid)": f"""
    UPDATE {{schema}}.link AS l SET matched = n.life, claim_seq = NULL, claim_clock = NULL FROM {{schema}}.node AS n
    WHERE {HELD} AND (l.matched IS DISTINCT FROM n.life OR l.claim_seq IS NOT NULL);""",
}
SIGNATURES = ("link_want(bigint, uuid, bigint)", "link_claim(bigint, uuid, bigint, bigint)", "link_match(bigint, uuid)")
COMMENTS = {
    "COLUMN link.by_role": "The login that said hello last.",
    "FUNCTION greeted()": "Notes which login has said hello.",
    "FUNCTION bound_reader()": "Bounds by how much a reader may raise the clock.",
    "FUNCTION link_want(bigint, uuid, bigint)": "A reader asks for a mark with a clock, or as far as it may.",
    "FUNCTION link_claim(bigint, uuid, bigint, bigint)": "A reader says what it has received that is not here.",
    "FUNCTION link_match(bigint, uuid)": "A reader has found its position here.",
}


def upgrade() -> None:
    schema = f'"{op.get_context().version_table_schema}"'
    acts = (ACT.replace("{name}", name).replace("{act}", act.strip()) for name, act in ACTS.items())
    for statement in (COLUMN, GREETED, GREETED_TRIGGER, BOUND, BOUND_TRIGGER, *acts):
        op.execute(statement.replace("{schema}", schema))
    for signature in SIGNATURES:
        op.execute(f"REVOKE ALL ON FUNCTION {signature} FROM PUBLIC")
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    for signature in SIGNATURES:
        op.execute(f"DROP FUNCTION {signature}")
    op.execute("DROP TRIGGER bounded ON link")
    op.execute("DROP TRIGGER greeted ON link")
    op.execute("DROP FUNCTION bound_reader()")
    op.execute("DROP FUNCTION greeted()")
    op.execute("UPDATE link SET wanted_clock = 4611686018427387904 WHERE wanted_clock > 4611686018427387904")
    op.execute(
        "ALTER TABLE link DROP by_role, DROP CONSTRAINT link_wanted_clock_check, "
        "ADD CONSTRAINT link_wanted_clock_check CHECK (wanted_clock BETWEEN 0 AND 4611686018427387904)"
    )
