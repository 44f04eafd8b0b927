"""Executables: their outbox, the store, accounting, and registered tables and functions."""

from alembic import op
from mailroom.schema import refuse_to_drop_messages

revision = "0107"
down_revision = "0106"
branch_labels = None
depends_on = None

# `xact` comes before `position`, as in the outbox: the floor depends on it.
OUTBOX_EXECUTABLE = """
CREATE TABLE outbox_executable (
    xact         xid8        NOT NULL DEFAULT pg_current_xact_id(),
    position     bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    message_id   uuid        NOT NULL DEFAULT gen_random_uuid(),
    version      smallint    NOT NULL DEFAULT 1,
    operation    text        COLLATE "C" NOT NULL,
    target       text        COLLATE "C" NOT NULL DEFAULT 'store',
    key          text        COLLATE "C" NOT NULL DEFAULT '',
    end_key      text        COLLATE "C",
    value        bytea,
    amount       bigint,
    bytes        bigint,
    expected     bytea,
    arguments    jsonb,
    at           timestamptz,
    row_limit    bigint,
    notify       text        COLLATE "C",
    headers      jsonb,
    after_clock  bigint,
    source       text        COLLATE "C" DEFAULT current_setting('application_name'),
    sent_at      timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000
)
"""

# Rows that break version 1 of the format are refused in the writer's transaction. Other versions are not known here;
# the executor moves them to dead_letter. A trigger, since executables come one by one: PostgreSQL parses all CHECKs of
# a table again for each statement, but compiles a function once per session. The error is that of a CHECK, without the
# row. As in a CHECK, a rule that is null holds.
RULES = {
    "operation": """CASE WHEN new.version <> 1 THEN true ELSE CASE new.operation
        WHEN 'put'          THEN new.key <> '' AND new.value IS NOT NULL AND num_nonnulls(
                                 new.end_key, new.amount, new.bytes, new.arguments, new.at, new.row_limit) = 0
        WHEN 'increment'    THEN new.key <> '' AND new.amount IS NOT NULL AND num_nonnulls(
                                 new.end_key, new.value, new.bytes, new.expected, new.arguments, new.at,
                                 new.row_limit) = 0
        WHEN 'delete'       THEN new.key <> '' AND num_nonnulls(
                                 new.end_key, new.value, new.amount, new.bytes, new.expected, new.arguments, new.at,
                                 new.row_limit) = 0
        WHEN 'delete_range' THEN num_nonnulls(
                                 new.value, new.amount, new.bytes, new.expected, new.arguments, new.at) = 0
        WHEN 'account'      THEN new.key <> '' AND num_nonnulls(new.amount, new.bytes) = 2
                                 AND new.target = 'accounting' AND num_nonnulls(
                                 new.end_key, new.value, new.expected, new.arguments, new.row_limit) = 0
        WHEN 'call'         THEN num_nonnulls(
                                 new.end_key, new.value, new.amount, new.bytes, new.expected, new.at,
                                 new.row_limit) = 0
        ELSE false END END""",
    "length": "octet_length(new.operation) <= 41",
    "target": "new.target ~ '^[a-z][a-z0-9_]*$' AND octet_length(new.target) <= 41",
    "key": "octet_length(new.key) <= 1024",
    "levels": "new.operation <> 'account' OR new.key !~ '^(?:[^/]*/){32}'",
    "end_key": "octet_length(new.end_key) BETWEEN 1 AND 1024",
    "value": "octet_length(new.value) <= 4194304",
    "expected": "octet_length(new.expected) <= 4194304",
    "arguments": "octet_length(new.arguments::text) <= 4194304",
    "at": "new.at >= '0001-01-01 UTC' AND new.at < '9999-01-01 UTC'",
    "row_limit": "new.row_limit >= 1",
    "notify": "new.notify ~ '^[A-Za-z][A-Za-z0-9_.-]*$' AND octet_length(new.notify) <= 200",
    "headers": "jsonb_typeof(new.headers) = 'object' AND octet_length(new.headers::text) <= 8192 "
    """AND NOT jsonb_path_exists(new.headers, 'strict $.* ? (@.type() <> "string")')""",
    "after_clock": "new.after_clock BETWEEN 0 AND 4611686018427387904",
    "source": "octet_length(new.source) <= 200",
    "sent_at": "new.sent_at >= '0001-01-01 UTC' AND new.sent_at < '9999-01-01 UTC'",
}
BROKEN = "\n        ".join(f"WHEN NOT ({rule}) THEN 'outbox_executable_{name}'" for name, rule in RULES.items())

CHECKED = f"""
CREATE FUNCTION check_executable() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    broken text;
BEGIN
    broken := CASE
        {BROKEN} END;
    IF broken IS NULL THEN
        RETURN new;
    END IF;
    RAISE check_violation USING
        MESSAGE = format('new row for relation "%s" violates check constraint "%s"', tg_table_name, broken),
        SCHEMA = tg_table_schema, TABLE = tg_table_name, CONSTRAINT = broken;
END $$
"""
CHECK = """
CREATE TRIGGER checked BEFORE INSERT OR UPDATE ON outbox_executable FOR EACH ROW EXECUTE FUNCTION check_executable()
"""

DOORBELL = "CREATE TRIGGER doorbell BEFORE INSERT ON outbox_executable FOR EACH STATEMENT EXECUTE FUNCTION doorbell()"

# Free space in each page, so that updates of a busy counter do not touch the index (HOT).
ROOM = """
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
"""

STORE = f"""
CREATE TABLE store (
    key    text COLLATE "C" PRIMARY KEY,
    value  bytea,
    number bigint,
    CONSTRAINT store_one_value CHECK (num_nonnulls(value, number) = 1)
) WITH ({ROOM})
"""

ACCOUNTING = f"""
CREATE TABLE accounting (
    key    text COLLATE "C" NOT NULL,
    minute timestamptz NOT NULL,
    count  bigint NOT NULL,
    bytes  bigint NOT NULL,
    PRIMARY KEY (key, minute)
) WITH ({ROOM})
"""

TARGETS = """
CREATE TABLE executable_target (
    name          text COLLATE "C" PRIMARY KEY
                  CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$' AND name NOT IN ('store', 'accounting')),
    table_schema  text NOT NULL,
    table_name    text NOT NULL,
    key_column    text NOT NULL,
    value_column  text,
    number_column text,
    created_at    timestamptz NOT NULL DEFAULT now()
)
"""

FUNCTIONS = """
CREATE TABLE executable_function (
    name            text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$'),
    function_schema text NOT NULL,
    function_name   text NOT NULL,
    timeout_s       double precision NOT NULL DEFAULT 10 CHECK (timeout_s > 0 AND timeout_s <= 300),
    created_at      timestamptz NOT NULL DEFAULT now()
)
"""

CURSOR = """
CREATE TABLE executable_cursor (
    position bigint PRIMARY KEY,
    reached  text   NOT NULL,
    deleted  bigint NOT NULL
)
"""

COMMENTS = {
    "outbox_executable": {
        None: "Where writers commit executables. Inserted once, deleted once by the executor, never updated.",
        "xact": "The writer's transaction. Writers do not set it.",
        "position": "Order of execution. Writers do not set it.",
        "message_id": "The executable's id: the header `correlation` of its reply.",
        "version": "Version of the format. An unknown version goes to dead_letter.",
        "operation": "put, increment, delete, delete_range, account or call.",
        "target": "What it acts on: store, accounting, or a name in executable_target or executable_function.",
        "key": "The key; for delete_range the first one, empty for the lowest.",
        "end_key": "For delete_range: the end, exclusive; null for no upper bound.",
        "value": "For put: the value.",
        "amount": "For increment: by how much. For account: how many.",
        "bytes": "For account: how many bytes.",
        "expected": "For put: the value the key must hold; empty bytes: the key must be absent.",
        "arguments": "For call: the argument of the function.",
        "at": "For account: when it happened; null for sent_at.",
        "row_limit": "For delete_range: at most so many keys.",
        "notify": "The topic that gets the reply; null for no reply.",
        "headers": "Flat map of text to text. The reply has those that are carried, such as saga and user.",
        "after_clock": "The reply is stamped later than this clock.",
        "source": "Who sent it: the writer's application_name.",
        "sent_at": "Physical time of the send; order never rests on it.",
    },
    "store": {
        None: "Values and counters by key, written by executables only.",
        "key": "The key.",
        "value": "The value; null for a counter.",
        "number": "The counter; null for a value.",
    },
    "accounting": {
        None: "The books: how many, and how many bytes, for every successive prefix of a key, by the minute.",
        "key": "A prefix of a key up to one of its slashes, or the whole key.",
        "minute": "The start of the minute.",
        "count": "How many.",
        "bytes": "How many bytes.",
    },
    "executable_target": {
        None: "Tables of the application that executables may write, by an administrator's registration.",
        "name": "The target's name in executables.",
        "table_schema": "The table's schema.",
        "table_name": "The table.",
        "key_column": "The key column, unique by itself.",
        "value_column": "The column that put writes; null if there is none.",
        "number_column": "The column that increment changes; null if there is none.",
        "created_at": "When it was registered.",
    },
    "executable_function": {
        None: "Functions that executables may call, by an administrator's registration.",
        "name": "The function's name in executables.",
        "function_schema": "The function's schema.",
        "function_name": "The function; it takes one jsonb.",
        "timeout_s": "How long a call may take, in seconds.",
        "created_at": "When it was registered.",
    },
    "executable_cursor": {
        None: "A large delete_range under way: how far it is.",
        "position": "The executable's position.",
        "reached": "The last key reached.",
        "deleted": "How many keys were deleted so far.",
    },
}

TABLES = ("executable_cursor", "executable_function", "executable_target", "accounting", "store", "outbox_executable")


def upgrade() -> None:
    for statement in (OUTBOX_EXECUTABLE, CHECKED, CHECK, DOORBELL, STORE, ACCOUNTING, TARGETS, FUNCTIONS, CURSOR):
        op.execute(statement)
    op.execute("COMMENT ON FUNCTION check_executable() IS 'Refuses rows that are not valid executables.'")
    for table, columns in COMMENTS.items():
        for column, text in columns.items():
            what = f"TABLE {table}" if column is None else f"COLUMN {table}.{column}"
            op.execute(f"COMMENT ON {what} IS '{text.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), ("outbox_executable", "store", "accounting"))
    for table in TABLES:
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION check_executable()")
