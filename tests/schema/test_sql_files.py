"""SQL files of migrations: each statement by itself, with the comments that stand after what it makes."""

from pathlib import Path

from mailroom.schema.sql_files import statements_of

FILE = r"""-- About the file.

-- Why it is; not a statement of its own.
CREATE TABLE node (  -- This node's row.
    -- Why this column comes first;
    id    uuid NOT NULL,             -- Its id; "quoted".
    "key" text DEFAULT 'a;b--c''d',  -- A word of SQL's own.
    {more}
);
CREATE VIEW seen AS SELECT  -- What is seen.
    NULL::text AS message_id  -- An id.
WHERE false;
CREATE FUNCTION {schema}_f(a int)  -- What it does.
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    b text;  -- no comment of a column
BEGIN
    RETURN 'a;' || b;
END $$;
GRANT SELECT ON seen TO PUBLIC;  -- it shows nothing
-- The end.
DROP TABLE node;
"""


def test_statements_are_parted_and_what_they_make_has_its_comments(tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_text(FILE)
    found = list(statements_of([tmp_path / "a.sql"], {"schema": "mine", "more": "n int  -- A number."}))
    assert [statement.partition("\n")[0] for statement in found] == [
        "CREATE TABLE node (  -- This node's row.",
        "COMMENT ON TABLE node IS 'This node''s row.'",
        "COMMENT ON COLUMN node.id IS 'Its id; \"quoted\".'",
        "COMMENT ON COLUMN node.\"key\" IS 'A word of SQL''s own.'",
        "COMMENT ON COLUMN node.n IS 'A number.'",
        "CREATE VIEW seen AS SELECT  -- What is seen.",
        "COMMENT ON VIEW seen IS 'What is seen.'",
        "COMMENT ON COLUMN seen.message_id IS 'An id.'",
        "CREATE FUNCTION mine_f(a int)  -- What it does.",
        "COMMENT ON FUNCTION mine_f IS 'What it does.'",
        "GRANT SELECT ON seen TO PUBLIC",
        "DROP TABLE node",
    ]
    assert found[8].endswith("RETURN 'a;' || b;\nEND $$")
