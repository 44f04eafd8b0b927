"""Execute: users' tables, whose constraints, triggers and other writers see one operation after another."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.executor.applying import apply as applies
from dispatcher.executor.applying.apply import HIDDEN, ApplyState
from dispatcher.executor.batch.fold import Taken
from dispatcher.executor.targets import target as targets
from mailroom.sql import runner
from mailroom.values import codec
from outbox import Executable, Store
from tests.support.databases import Connect
from tests.support.executing import (
    LARGEST,
    SCHEMA,
    SMALLEST,
    STORE,
    THINGS,
    UNREGISTERED,
    Model,
    Things,
    check_equal,
    dead_of,
    execute,
    execute_all,
    function,
    make_things,
    register,
    sent,
    store_of,
    things_of,
    told_of,
    trigger,
    waiting,
)
from tests.support.node import Node
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.both_versions


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "keys", "bad"),
    [
        ("smallint", ["-32768", "7", "32767"], ["32768", "x", "07", "+7", "-0", " 7"]),
        ("integer", ["-2147483648", "7", "2147483647"], ["2147483648", ""]),
        ("bigint", [str(SMALLEST), "7", str(LARGEST)], [str(LARGEST + 1), "1e3", "٣"]),
        ("uuid", [str(UUID(int=nth)) for nth in (1, 2, 3)], ["x", "1"]),
        ("text", ["a", "ü", "€ "], []),
        ("varchar", ["a", "ü", "€ "], []),
    ],
)
@pytest.mark.parametrize("value", ["bytea", "text"])
def test_table_of_a_user_may_have_keys_of_these_types(
    node: Node, kind: str, keys: list[str], bad: list[str], value: str
) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute(f"CREATE TABLE app.it (k {kind} PRIMARY KEY, v {value}, n bigint)".encode())
    register(node.connection, "it", "app.it", "k", "v", "n")
    it = Store(target="it")
    for key in keys:
        sent(node, it.put, key, b"v")
        sent(node, it.increment, key, 2)
    sent(node, it.put, keys[0], b"w", expected=b"v")
    sent(node, it.delete, keys[1])
    ids = [sent(node, it.increment, key) for key in bad if key]
    execute(node)
    texts = "convert_from(v, 'UTF8')" if value == "bytea" else "v"
    assert sorted(node.rows(f"SELECT k::text, {texts}, n FROM app.it")) == sorted(
        [(keys[0], "w", 2), (keys[2], "v", 2)]
    )
    assert [(id, reason.partition("not a valid ")[0]) for id, reason in dead_of(node.connection)] == [
        (id, "the key is ") for id in ids
    ]
    sent(node, it.delete_range, keys[0], keys[2])
    execute(node)
    assert node.rows("SELECT k::text FROM app.it") == [(keys[2],)]


def test_key_that_is_none_of_its_table_is_refused_alone_in_its_batch_too(node: Node) -> None:
    make_things(node.connection)
    for rows in (1, 10):
        id = sent(node, THINGS.increment, "x", notify="outcomes")
        execute(node, rows=rows)
        assert dead_of(node.connection)[-1] == (id, "the key is not a valid integer")
    assert [status for _, status, _, _ in told_of(node.connection)] == [500, 500]


def test_one_row_with_a_uuid_has_one_name_however_it_is_spelled(node: Node) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute("CREATE TABLE app.it (k uuid PRIMARY KEY, n integer NOT NULL)")
    register(node.connection, "it", "app.it", "k", None, "n")
    key = uuid4()
    for text in (str(key), str(key).upper(), key.hex, f"{{{key}}}"):
        sent(node, Store(target="it").increment, text)
    execute(node)
    assert node.rows("SELECT k, n FROM app.it") == [(key, 4)]


def test_bad_row_of_a_table_is_found_by_halving_and_the_others_are_written(node: Node) -> None:
    make_things(node.connection)
    trigger(node, "BEFORE INSERT", "IF new.id = 37 THEN RAISE 'not 37'; END IF; RETURN new;")
    with unguarded():
        ids = [sent(node, THINGS.increment, str(key)) for key in range(100)]
        sent(node, STORE.increment, "n")
        [execution] = execute(node)
    assert execution.taken == 101
    assert dead_of(node.connection) == [(ids[37], "RaiseException (P0001) not 37")]
    assert things_of(node.connection) == {key: [None, 1] for key in range(100) if key != 37}
    assert store_of(node.connection) == {"n": 1}


def drop_things(node: Node) -> None:
    """Undo `make_things`, and forget what has died."""
    node.connection.execute(
        "DROP SCHEMA app CASCADE; DELETE FROM mailroom.executable_target; DELETE FROM mailroom.dead_letter"
    )


@contextmanager
def unguarded() -> Iterator[None]:
    """Have no table looked upon as guarded."""
    made = targets._target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_target", lambda *given, guarded: made(*given, guarded=False))
        yield


GUARDS = {
    "check": "ALTER TABLE app.thing ADD CHECK (total <> 3)",
    "exclusion": "ALTER TABLE app.thing ADD EXCLUDE (body WITH =)",
    "unique": "ALTER TABLE app.thing ADD UNIQUE (body)",
    "unique index": "CREATE UNIQUE INDEX ON app.thing ((total % 5))",
    "foreign key": "CREATE TABLE app.of (n smallint PRIMARY KEY); ALTER TABLE app.thing ADD FOREIGN KEY (total) "
    "REFERENCES app.of",
    "referenced": "CREATE TABLE app.part (thing integer REFERENCES app.thing)",
    "trigger": "CREATE TRIGGER t BEFORE UPDATE ON app.thing FOR EACH ROW "
    "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "rule": "CREATE RULE r AS ON DELETE TO app.thing DO ALSO NOTHING",
    "row security": "ALTER TABLE app.thing ENABLE ROW LEVEL SECURITY",
    "must be given": "ALTER TABLE app.thing ADD other text NOT NULL",
    "value must be given": "ALTER TABLE app.thing ALTER body SET NOT NULL",
    "value must be given, by default": "ALTER TABLE app.thing ALTER body SET NOT NULL, ALTER body SET DEFAULT ''",
    "value of a length": "ALTER TABLE app.thing ALTER body TYPE varchar(3)",
    "key of a length": "ALTER TABLE app.thing ALTER id TYPE varchar(3)",
    "inherited": "CREATE TABLE app.child () INHERITS (app.thing)",
    "partition": "CREATE TABLE app.whole (LIKE app.thing) PARTITION BY RANGE (total); "
    "ALTER TABLE app.whole ATTACH PARTITION app.thing FOR VALUES FROM (0) TO (3)",
    "computed column": "ALTER TABLE app.thing ADD tenth integer GENERATED ALWAYS AS (10 / (total - 3)) STORED",
    "computed index": "CREATE INDEX ON app.thing ((10 / (total - 3)))",
    "index of some rows": "CREATE INDEX ON app.thing (total) WHERE 10 / (total - 3) > 1",
    "index of the value": "CREATE INDEX ON app.thing (body)",
    "domain": "CREATE DOMAIN app.given AS text NOT NULL; ALTER TABLE app.thing ADD other app.given",
}


def test_table_whose_constraints_could_tell_is_written_one_operation_at_a_time(node: Node) -> None:
    make_things(node.connection)
    folded = []
    for guard, statement in GUARDS.items():
        with node.connection.transaction(force_rollback=True):
            node.connection.execute(statement.encode())
            folded += [] if is_guarded(node) else [guard]
    assert folded == []


def test_table_with_nothing_but_a_key_is_folded(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("ALTER TABLE app.thing ADD other text NOT NULL DEFAULT '', ALTER total SET NOT NULL")
    node.connection.execute("CREATE INDEX ON app.thing (total, other)")
    assert not is_guarded(node)
    for _ in range(3):
        sent(node, THINGS.delete, "1")
    assert groups_of(node) == [3]


def is_guarded(node: Node) -> bool:
    """Tell whether the table must see every operation."""
    return runner.run(node.connection, targets.reading_targets(SCHEMA, {"things"}))["things"].guarded


@pytest.mark.parametrize("rows", [1, 10])
def test_row_that_is_deleted_and_put_again_begins_anew_in_one_batch_too(node: Node, rows: int) -> None:
    make_things(node.connection)
    node.connection.execute("ALTER TABLE app.thing ADD other text DEFAULT 'begun'")
    node.connection.execute("INSERT INTO app.thing SELECT n, 'v', 7, 'old' FROM generate_series(1, 4) AS n")
    for key in ("1", "2", "3", "5"):
        sent(node, THINGS.delete, key)
        sent(node, THINGS.put, key, b"v")
    sent(node, THINGS.put, "4", b"w")
    sent(node, THINGS.increment, "2", 7)
    sent(node, THINGS.delete, "3")
    execute(node, rows=rows)
    assert node.rows("SELECT id, body, total, other FROM app.thing ORDER BY id") == [
        (1, "v", 0, "begun"),
        (2, "v", 7, "begun"),
        (4, "w", 7, "old"),
        (5, "v", 0, "begun"),
    ]


@pytest.mark.parametrize("rows", [1, 10])
def test_default_that_raises_refuses_what_is_deleted_in_one_batch_too(node: Node, rows: int) -> None:
    for default in ("10 / 0", "current_setting('app.tenant')", "nextval('app.few')"):
        make_things(node.connection)
        node.connection.execute("CREATE SEQUENCE app.few MINVALUE 0 MAXVALUE 1 START 1; SELECT nextval('app.few')")
        node.connection.execute(f"ALTER TABLE app.thing ADD other text, ALTER other SET DEFAULT {default}".encode())
        node.connection.execute("INSERT INTO app.thing VALUES (2, 'v', 1, 'given'), (3, 'v', 1, 'given')")
        refused = [sent(node, THINGS.increment, "1"), sent(node, THINGS.put, "1", b"v")]
        sent(node, THINGS.delete, "1")
        sent(node, THINGS.increment, "3")
        sent(node, THINGS.delete, "2")
        refused.append(sent(node, THINGS.increment, "2"))
        sent(node, THINGS.delete, "2")
        execute(node, rows=rows)
        assert [id for id, _ in dead_of(node.connection)] == refused, default
        assert things_of(node.connection) == {3: ["v", 2]}
        drop_things(node)


def test_write_is_not_hidden_by_a_delete_behind_it(node: Node) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute("CREATE TABLE app.it (k uuid PRIMARY KEY, n integer)")
    register(node.connection, "it", "app.it", "k", None, "n")
    key, it = uuid4(), Store(target="it")
    sends: list[tuple[Callable[..., UUID], str]] = [
        (it.delete, str(key)), (it.increment, str(key)), (it.increment, key.hex), (it.increment, str(uuid4())),
        (it.delete, str(key).upper()), (it.delete, str(key)), (it.increment, str(key)),
        (STORE.increment, "n"), (STORE.delete, "n"), (it.delete, key.hex), (it.delete, "x"),
    ]  # fmt: skip
    for send, name in sends:
        sent(node, send, name)
    assert groups_of(node) == [4, 5, 2]
    assert [reason for _, reason in dead_of(node.connection)] == ["the key is not a valid uuid"]


def groups_of(node: Node) -> list[int]:
    """Execute, and return the sizes of the groups that were applied as one."""
    sizes = []
    applying = applies._applying

    def noted(state: ApplyState, group: list[Taken], following: list[Taken]) -> Any:
        sizes.append(len(group))
        return applying(state, group, following)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applies, "_applying", noted)
        execute(node)
    return sizes


def test_table_with_a_check_comes_to_what_one_after_another_comes_to(node: Node) -> None:
    make_things(node.connection, "total BETWEEN 0 AND 10")
    refusal = "CheckViolation (23514) thing_check thing"
    model = Model(Things(check=lambda entry: None if 0 <= entry[1] <= 10 else refusal))
    parts: list[dict[str, Any]] = [
        {"operation": "increment", "amount": amount} for amount in (4, 7, -5, 6, -4, 1, 11, -10, 3)
    ]
    parts[3:3] = [{"operation": "put", "value": b"v"}, {"operation": "delete"}, {"operation": "put", "value": b"w"}]
    executables = [
        Executable(**each, key="1", target="things", id=UUID(int=nth), notify="outcomes")
        for nth, each in enumerate(parts)
    ]
    with node.connection.transaction():
        STORE.send_many(node.connection, executables)
    model.apply(executables)
    execute(node)
    assert len(model.dead) > 2
    check_equal(node.connection, model)


def test_trigger_of_a_table_sees_every_write(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("CREATE TABLE app.seen (total smallint)")
    trigger(node, "AFTER INSERT OR UPDATE", "INSERT INTO app.seen VALUES (new.total); RETURN null;")
    for amount in (1, 2, 0):
        sent(node, THINGS.increment, "1", amount)
    execute(node)
    assert node.rows("SELECT total FROM app.seen") == [(1,), (3,), (3,)]


def test_trigger_may_send_executables_which_are_executed_too(node: Node) -> None:
    make_things(node.connection)
    trigger(
        node,
        "AFTER INSERT",
        "INSERT INTO mailroom.outbox_executable (operation, key, amount) VALUES ('increment', 'n', 1); RETURN null;",
    )
    sent(node, THINGS.increment, "1")
    execute(node)
    assert store_of(node.connection) == {"n": 1}


def test_table_under_two_names_has_both_of_its_columns_counted(node: Node) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute("CREATE TABLE app.it (k text PRIMARY KEY, m bigint, n bigint)")
    register(node.connection, "ms", "app.it", "k", None, "m")
    register(node.connection, "ns", "app.it", "k", None, "n")
    for name in ("ms", "ns", "ns", "ms"):
        sent(node, Store(target=name).increment, "a")
    sent(node, Store(target="ms").delete, "a")
    sent(node, Store(target="ns").increment, "a", 5)
    execute(node)
    assert node.rows("SELECT k, m, n FROM app.it") == [("a", None, 5)]
    assert dead_of(node.connection) == []


def test_names_with_anything_but_a_quote_in_them_are_taken(node: Node) -> None:
    node.connection.execute('CREATE SCHEMA "100% s"')
    node.connection.execute(b'CREATE TABLE "100% s"."%s T" ("%(k)s" text PRIMARY KEY, "N n" bigint)')
    node.connection.execute(b'CREATE FUNCTION "100% s"."%s f"(jsonb) RETURNS integer LANGUAGE sql AS \'SELECT 7\'')
    register(node.connection, "odd", "100% s.%s T", "%(k)s", None, "N n")
    node.connection.execute("INSERT INTO mailroom.executable_function VALUES ('odd', '100%% s', '%%s f')", [])
    sent(node, Store(target="odd").increment, "a", 5)
    sent(node, STORE.call, "odd", notify="outcomes")
    execute(node)
    assert node.connection.execute(b'SELECT "N n" FROM "100% s"."%s T"').fetchall() == [(5,)]
    assert [told["result"] for *_, told in told_of(node.connection)] == [7]


def test_counter_in_a_column_that_may_be_null_begins_at_0(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1, 'v', null)")
    sent(node, THINGS.increment, "1", 3)
    sent(node, THINGS.put, "2", b"w")
    execute(node)
    assert things_of(node.connection) == {1: ["v", 3], 2: ["w", 0]}


CHANGED = [
    "ALTER TABLE app.thing DROP body",
    "ALTER TABLE app.thing DROP total",
    "ALTER TABLE app.thing RENAME id TO di",
    "ALTER TABLE app.thing ALTER total TYPE numeric",
    "ALTER TABLE app.thing ALTER body TYPE char(3)",
    "ALTER TABLE app.thing ALTER id TYPE numeric",
    "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey",
    "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey; ALTER TABLE app.thing ADD UNIQUE (id, total)",
    "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey; ALTER TABLE app.thing ADD PRIMARY KEY (id) DEFERRABLE",
    "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey; CREATE UNIQUE INDEX ON app.thing (id) WHERE total > 0",
    "DROP TABLE app.thing",
    "ALTER SCHEMA app RENAME TO ppa",
]


def test_table_that_is_another_by_now_is_not_written(node: Node) -> None:
    for changed in CHANGED:
        make_things(node.connection)
        check_not_written(node, changed)
        node.connection.execute("DROP SCHEMA IF EXISTS ppa CASCADE; CREATE SCHEMA IF NOT EXISTS app")
        drop_things(node)


def test_table_whose_collation_is_another_by_now_is_not_written(node: Node) -> None:
    if not node.value("SELECT count(*) FROM pg_collation WHERE collname ~ '-x-icu'"):
        pytest.skip("this server was built without ICU")
    make_things(node.connection)
    check_not_written(
        node,
        "CREATE COLLATION app.c (provider = icu, locale = 'und-u-ks-level2', deterministic = false); "
        "ALTER TABLE app.thing ALTER id TYPE text COLLATE app.c",
    )


def check_not_written(node: Node, changed: str) -> None:
    node.connection.execute(changed.encode())
    ids = [sent(node, THINGS.increment, "1"), sent(node, THINGS.delete_range)]
    before = store_of(node.connection).get("n", 0)
    sent(node, STORE.increment, "n")
    execute(node)
    assert sorted(dead_of(node.connection)) == sorted((id, UNREGISTERED) for id in ids), changed
    assert store_of(node.connection) == {"n": before + 1}


def test_constraint_that_is_deferred_fails_the_executable_and_not_the_commit(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("CREATE TABLE app.of (total smallint PRIMARY KEY)")
    node.connection.execute("INSERT INTO app.of VALUES (1)")
    node.connection.execute(
        "ALTER TABLE app.thing ADD FOREIGN KEY (total) REFERENCES app.of DEFERRABLE INITIALLY DEFERRED"
    )
    body = "INSERT INTO app.thing VALUES (given::integer, null, 7);"
    function(node, "late", f"BEGIN SET CONSTRAINTS ALL DEFERRED; {body} END", "void")
    # It looks at the constraint as soon as it has written, whatever was done before it in its batch.
    function(
        node, "catches", f"BEGIN {body} RETURN 0; EXCEPTION WHEN foreign_key_violation THEN RETURN 1; END", "integer"
    )
    ids = [sent(node, THINGS.increment, "1", amount) for amount in (1, 1, -1)]
    asked: dict[str, Any] = {"notify": "outcomes"}
    sent(node, STORE.call, "catches", 3, **asked)
    late = sent(node, STORE.call, "late", 2)
    sent(node, STORE.call, "catches", 3, **asked)
    execute(node)
    reason = "ForeignKeyViolation (23503) thing_total_fkey thing"
    # 1 + 1 is refused, and so is 1 - 1.
    assert dead_of(node.connection) == [(ids[1], reason), (ids[2], reason), (late, reason)]
    assert things_of(node.connection) == {1: [None, 1]}
    assert [told["result"] for *_, told in told_of(node.connection)] == [1, 1]


def test_schema_that_the_executor_may_not_use_fails_its_executables_only(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    function(node, "f", "BEGIN END", "void")
    role = f"plain_{uuid4().hex}"
    node.connection.execute(f"CREATE ROLE {role}".encode())
    try:
        node.connection.execute(
            f"GRANT USAGE ON SCHEMA mailroom TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {role};"
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA mailroom TO {role}".encode()
        )
        sent(node, THINGS.increment, "1")
        sent(node, STORE.call, "f")
        sent(node, STORE.increment, "n")
        sent(node, THINGS.delete_range)
        execute_all(connect(autocommit=True, options=f"-c role={role}"))
        assert {reason for _, reason in dead_of(node.connection)} == {"InsufficientPrivilege (42501)"}
        assert len(dead_of(node.connection)) == 3
        assert store_of(node.connection) == {"n": 1}
    finally:
        node.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


# -- Beside others ----------------------------------------------------------------------------------------------------


def test_row_that_somebody_inserts_between_the_look_and_the_write_is_not_overwritten(
    node: Node, connect: Connect
) -> None:
    make_things(node.connection)
    other = connect(autocommit=True)
    sent(node, THINGS.increment, "1", 5, notify="outcomes")
    sent(node, THINGS.put, "2", b"v", expected=b"", notify="outcomes")
    sent(node, STORE.increment, "n")

    def insert() -> None:
        other.execute("INSERT INTO app.thing VALUES (1, 'theirs', 100), (2, 'theirs', 100) ON CONFLICT DO NOTHING")

    executing_beside(node, insert)
    assert things_of(node.connection) == {1: ["theirs", 105], 2: ["theirs", 100]}
    assert [(status, event) for _, status, event, _ in told_of(node.connection)] == [(200, "U"), (409, None)]
    assert store_of(node.connection) == {"n": 1}


def executing_beside(node: Node, before_write: Callable[[], None]) -> None:
    """Execute, with a call each time after a look at the keys and before their write."""
    finding = targets.finding_contents

    def found(*given: Any) -> Any:
        contents = yield from finding(*given)
        before_write()
        return contents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applies, "finding_contents", found)
        execute(node)


def test_row_that_can_neither_be_seen_nor_inserted_is_given_up(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    trigger(node, "BEFORE INSERT", "IF new.id < 3 THEN RETURN null; END IF; RETURN new;")
    ids = [sent(node, THINGS.increment, str(key)) for key in (1, 3, 2)]
    with unguarded():
        execute(node)
    assert dead_of(node.connection) == [(ids[0], HIDDEN), (ids[2], HIDDEN)]
    assert things_of(node.connection) == {3: [None, 1]}


def test_row_that_somebody_writes_is_waited_for_and_nothing_is_lost(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    sent(node, THINGS.increment, "1", 5)
    execute(node)
    other = connect()
    other.execute("UPDATE app.thing SET total = total * 10")
    sent(node, THINGS.increment, "1", 1)
    with ThreadPoolExecutor(1) as thread:
        pid = node.connection.info.backend_pid
        executed = thread.submit(execute, node)
        assert wait_until_blocked(other, pid) == [other.info.backend_pid]
        other.commit()
        executed.result()
    assert things_of(node.connection) == {1: [None, 51]}


def test_rows_that_stay_locked_hold_the_batch_up_and_nothing_is_lost(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1, 'theirs', 1), (2, 'theirs', 1)")
    other = connect()
    node.connection.execute("SET lock_timeout = '50ms'")
    sends: list[tuple[Callable[..., UUID], list[Any]]] = [(THINGS.increment, ["1", 5]), (THINGS.delete_range, ["2"])]
    for send, given in sends:
        other.execute("SELECT FROM app.thing FOR UPDATE")
        sent(node, send, *given, notify="outcomes")
        sent(node, STORE.increment, "n")
        before = list(waiting(node.connection)), store_of(node.connection)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            execute(node)
        assert (list(waiting(node.connection)), store_of(node.connection)) == before
        assert dead_of(node.connection) == []
        other.rollback()
        execute(node)
    assert store_of(node.connection) == {"n": 2}
    assert things_of(node.connection) == {1: ["theirs", 6]}
    assert [status for _, status, _, _ in told_of(node.connection)] == [200, 200]


def test_two_executors_at_once_execute_nothing_twice_and_in_order(dsn: str, node: Node, connect: Connect) -> None:
    with node.connection.transaction():
        STORE.send_many(
            node.connection,
            [Executable("put", "k", value=str(nth).encode(), notify="outcomes") for nth in range(60)],
        )
    first, second = connect(autocommit=True), connect(autocommit=True)
    with ThreadPoolExecutor(2) as threads:
        executions = threads.map(lambda connection: execute_all(connection, rows=5), (first, second))
        taken = sum(each.taken for of_one in executions for each in of_one)
    assert taken == 60
    assert store_of(node.connection) == {"k": b"59"}
    assert len(told_of(node.connection)) == 60


def test_encoded_dead_letter_is_a_map_without_what_is_null(node: Node) -> None:
    sent(node, Store(target="nowhere").delete, "k")
    execute(node)
    raw: Any = codec.decode(node.value("SELECT value FROM mailroom.dead_letter"))
    assert raw == {"version": 1, "operation": "delete", "target": "nowhere", "key": "k"}
