"""The sift: find all copies of messages that the database refuses by themselves, in one statement.

A DO block has no parameters and no result, so both are passed as settings of the transaction. It inserts the copies
one by one. A refusal undoes the inserts since the one before, but not the cursor's position, so each copy is tried
once however many are refused. With savepoints from the client, or by halving, one refused message cost 2 s. In the
end everything is undone.
"""

import json
from typing import Any

from psycopg import errors

from mailroom.message.columns import MESSAGE, MOVING, listed
from mailroom.sql.operation import Execute, Operation, Sql
from mailroom.sql.sqlstate import OF_THE_DATA

# D-deliver-8: A batch that fails on data is sifted in the server.
# {copies} is the query, in the order in which they would be inserted. {passing} comes before each insert, and {noting}
# after a refusal: it adds to `refused` what tells the copy, and the names of the error.
TEXT = """
DO $sift$
DECLARE
    copies CURSOR FOR
        {copies};
    copy record;
    {declared}
    refused text[] := '{}';
    of_state text; of_constraint text; of_table text; of_column text;
BEGIN{first}
    BEGIN
        OPEN copies;
        LOOP
            BEGIN
                LOOP
                    FETCH copies INTO copy;
                    EXIT WHEN NOT FOUND;
                    {passing}
                    {into_log}INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
                    VALUES (copy.inbox, {clocks}, copy.origin, {copied});{end_log}
                END LOOP;
                EXIT;
            EXCEPTION WHEN {conditions} THEN
                GET STACKED DIAGNOSTICS of_state = RETURNED_SQLSTATE, of_constraint = CONSTRAINT_NAME,
                                        of_table = TABLE_NAME, of_column = COLUMN_NAME;
                {noting}
            END;
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'MR000';
    EXCEPTION WHEN SQLSTATE 'MR000' THEN NULL;
    END;
    PERFORM set_config('mailroom.refused', '[' || array_to_string(refused, ',') || ']', true);
END $sift$
"""
ANSWER = Sql("SELECT current_setting('mailroom.refused')", columns=("text",))


INTO_LOG = """IF copy.lanes IS NOT NULL THEN
                        INSERT INTO {schema}.log (log, segment, lane, clock, sent_clock, origin, {message})
                        VALUES (copy.inbox, copy.segment, {schema}.lane_of(copy.key, copy.lanes), {clocks}, copy.origin,
                                {copied});
                    ELSE
                    """


def sift(
    copies: str, *, declared: str, passing: str, clocks: str, noting: str, first: str = "", has_logs: bool = False,
    **parts: Any,
) -> Sql:  # fmt: skip
    """Return the statement; `parts` are those of the query."""
    return Sql(
        TEXT, into_log=INTO_LOG if has_logs else "", end_log=" END IF;" if has_logs else "",
        copies=copies, declared=declared, first=first, passing=passing, clocks=clocks, noting=noting,
        message=MESSAGE, copied=listed(MOVING, of="copy"), conditions=" OR ".join(OF_THE_DATA.values()), **parts,
    )  # fmt: skip


def sift_of_messages(copies: str, *, number: str, sent_clock: str, **parts: Any) -> Sql:
    """Return the statement for messages that are refused as a whole, each by its `number` in the query.

    The copies get clocks of their own, as they would.
    """
    return sift(
        copies,
        has_logs=True,
        declared="stamp bigint := (SELECT last_value FROM {schema}.clock);\n    skipped bigint;",
        passing=f"CONTINUE WHEN copy.{number} = skipped;\n                    stamp := stamp + 1;",
        clocks=f"stamp, {sent_clock}",
        noting=f"""skipped := copy.{number};
                refused := array_append(
                    refused, json_build_array(skipped, of_state, of_constraint, of_table, of_column)::text);""",
        **parts,
    )


def sifting(statement: Execute) -> Operation[list[tuple[list[Any], str]]]:
    """Run a sift; return what tells each refused copy, and the reason."""
    yield statement
    [(answer,)] = yield ANSWER.at()()
    return [(each[:-4], reason_of(*each[-4:])) for each in json.loads(answer)]


def reason_of(sqlstate: str, *names: str | None) -> str:
    """Return a reason from the names of constraint, table and column. Not the error's detail, which repeats the row."""
    try:
        kind = errors.lookup(sqlstate).__name__
    except KeyError:
        kind = "DatabaseError"
    return " ".join([f"{kind} ({sqlstate})", *(name for name in names if name)])
