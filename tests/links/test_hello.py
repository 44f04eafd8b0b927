"""Hello: two nodes find out who they are, and refuse each other with one line that names the command."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from mailroom.errors import LinkRefused
from mailroom.links.handshake.hello import Greeting, LinkTaken, Rivals, asking_topics, greeting, matching
from mailroom.links.handshake.identity import Party
from mailroom.links.handshake.target import (  # fmt: skip
    Origin,
    introducing,
    opening,
    pinning,
    reading_origins,
    stopping,
)
from mailroom.schema import migrate
from mailroom.sql.runner import run
from tests.support.links import wanted_topics
from tests.support.node import SCHEMA, Node
from tests.support.waiting import wait_until_blocked


class Meeting:
    """A target that says hello to its source: each call is a transaction, as the daemon makes them."""

    def __init__(self, source: Node, target: Node) -> None:
        self.source = source
        self.target = target

    @property
    def origin(self) -> Origin:
        [found] = run(self.target.connection, reading_origins(SCHEMA))
        return found

    @property
    def party(self) -> Party:
        return run(self.target.connection, introducing(SCHEMA, self.origin))

    def greet(self, run_id: UUID | None = None, connection: Any = None) -> Greeting:
        """Say hello, at the source only."""
        origin, party = self.origin, self.party
        connection = connection or self.source.connection
        with connection.transaction():
            return run(connection, greeting(origin.schema, origin.name, party, origin.pinned, run_id or uuid4()))

    def pin(self, found: Greeting) -> Origin:
        """Note the answer at the target."""
        with self.target.connection.transaction():
            return run(self.target.connection, pinning(SCHEMA, self.origin, found))

    def hello(self, run_id: UUID | None = None) -> Greeting:
        """Say hello, and note the answer."""
        found = self.greet(run_id)
        self.pin(found)
        return found

    def refused(self) -> str:
        """Say hello, which is refused and leaves everything as it was; return the line."""
        before = self.link()
        with pytest.raises(LinkRefused) as raised:
            self.greet()
        assert self.link() == before
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def link(self, columns: str = "link.*") -> Any:
        return self.source.rows(f"SELECT {columns} FROM mailroom.link ORDER BY number")

    def allow(self) -> int:
        number: int = self.source.value("INSERT INTO mailroom.link (name) VALUES ('south') RETURNING number")
        return number

    def add(self) -> None:
        self.target.connection.execute("INSERT INTO mailroom.origin (name, reader) VALUES ('north', 'south')")


@pytest.fixture
def meeting(source: Node, target: Node) -> Meeting:
    meeting = Meeting(source, target)
    note_place(source)
    meeting.allow()
    meeting.add()
    return meeting


# -- What each side notes ---------------------------------------------------------------------------------------------


def test_first_hello_is_noted_on_both_sides(meeting: Meeting) -> None:
    run_id = uuid4()
    found = meeting.greet(run_id)
    party = meeting.party
    assert meeting.link(
        "reader_id, reader_system_id, reader_database_oid, reader_origin, run, seen_at IS NOT NULL"
    ) == [(party.id, party.place.system_id, party.place.database_oid, meeting.origin.number, run_id, True)]
    assert found.id == meeting.source.value("SELECT id FROM mailroom.node")
    assert (found.acked, found.in_doubt, found.taken_from) == (0, True, None)
    pinned = meeting.pin(found)
    assert pinned == meeting.origin
    assert (pinned.id, pinned.incarnation, pinned.link) == (found.id, 1, found.link)
    assert (pinned.system_id, pinned.timeline) == (found.place.system_id, found.place.timeline)


def test_hello_notes_how_long_the_source_keeps_its_rows(meeting: Meeting) -> None:
    meeting.hello()
    assert meeting.origin.keep_s == 172_800
    meeting.source.connection.execute("UPDATE mailroom.link SET keep_s = 3600")
    meeting.hello()
    assert meeting.origin.keep_s == 3_600


def test_second_hello_writes_nothing_at_the_target(meeting: Meeting) -> None:
    meeting.hello()
    before = meeting.target.value("SELECT xmin::text FROM mailroom.origin")
    meeting.hello()
    assert meeting.target.value("SELECT xmin::text FROM mailroom.origin") == before


def test_pin_is_durable_before_anything_rests_on_it(meeting: Meeting) -> None:
    found = meeting.greet()
    with meeting.target.connection.transaction():
        meeting.target.connection.execute("SET LOCAL synchronous_commit = off")
        run(meeting.target.connection, pinning(SCHEMA, meeting.origin, found))
        assert meeting.target.value("SHOW synchronous_commit") == "on"


def test_link_is_in_doubt_until_the_position_was_found_in_this_life(meeting: Meeting) -> None:
    run_id = uuid4()
    link = meeting.hello(run_id).link
    assert run(meeting.source.connection, matching(SCHEMA, link, run_id))
    assert not run(meeting.source.connection, matching(SCHEMA, link, run_id))
    assert not meeting.hello(run_id).in_doubt
    meeting.source.connection.execute("UPDATE mailroom.node SET life = gen_random_uuid()")
    assert meeting.hello(run_id).in_doubt


def test_match_settles_the_claim(meeting: Meeting) -> None:
    run_id = uuid4()
    link = meeting.hello(run_id).link
    run(meeting.source.connection, matching(SCHEMA, link, run_id))
    meeting.source.connection.execute("UPDATE mailroom.link SET claim_seq = 7, claim_clock = 70")
    assert meeting.hello(run_id).claim_seq == 7
    assert run(meeting.source.connection, matching(SCHEMA, link, run_id))
    assert meeting.link("claim_seq, claim_clock") == [(None, None)]


def test_new_link_starts_over_and_keeps_the_clock_that_was_shown(meeting: Meeting) -> None:
    first = meeting.hello().link
    meeting.target.connection.execute(
        "INSERT INTO mailroom.receipt (origin, last, first, last_id, stamped_at, sent_clock, ids) "
        "VALUES (%s, 7, 1, gen_random_uuid(), now(), 70, '{}')",
        [meeting.origin.number],
    )
    meeting.source.connection.execute("DELETE FROM mailroom.link")
    meeting.allow()
    assert meeting.hello().link > first
    assert meeting.target.rows("SELECT last FROM mailroom.receipt") == []
    assert meeting.origin.shown == 70


def note_place(node: Node, **changes: int) -> None:
    """Note where the node is, as its dispatcher does; `changes` are added to what it notes."""
    added = {"system_id": 0, "database_oid": 0} | changes
    node.connection.execute(
        "UPDATE mailroom.node SET system_id = (SELECT system_identifier FROM pg_control_system()) + %(system_id)s, "
        "database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())::bigint + %(database_oid)s, "
        "timeline = (SELECT timeline_id FROM pg_control_checkpoint()), started_at = pg_postmaster_start_time()",
        added,
    )


# -- Refusals ---------------------------------------------------------------------------------------------------------


def test_reader_that_was_not_allowed_is_refused(meeting: Meeting) -> None:
    meeting.source.connection.execute("DELETE FROM mailroom.link")
    assert meeting.refused() == "north allows no reader south; at north: mailroom link allow south"


def test_source_whose_dispatcher_has_not_started_since_the_server_did_is_refused(meeting: Meeting) -> None:
    meeting.source.connection.execute("UPDATE mailroom.node SET started_at = started_at - interval '1 s'")
    assert meeting.refused() == (
        "no dispatcher of north has started since its server did; at north: mailroom dispatcher run"
    )


def test_link_that_was_cut_is_refused(meeting: Meeting) -> None:
    meeting.source.connection.execute("UPDATE mailroom.link SET state = 'cut'")
    assert meeting.refused().endswith("at north: mailroom link remove south, then mailroom link allow south")


def test_source_without_a_node_is_refused(meeting: Meeting) -> None:
    meeting.target.connection.execute("UPDATE mailroom.origin SET schema = 'shop'")
    assert meeting.refused() == "north has no schema 'shop' with links; at north: mailroom migrate --schema shop"


def test_one_id_on_both_sides_is_refused(meeting: Meeting) -> None:
    here = meeting.source.value("SELECT id FROM mailroom.node")
    meeting.target.connection.execute("UPDATE mailroom.node SET id = %s", [here])
    assert "one is a copy" in (line := meeting.refused())
    assert line.endswith("at the copy: mailroom node new-id")


def test_other_id_than_pinned_is_refused(meeting: Meeting) -> None:
    meeting.hello()
    meeting.source.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
    assert "another node than before" in (line := meeting.refused())
    assert line.endswith("at south: mailroom link remove north, then mailroom link add north")


def test_reader_with_another_id_than_noted_is_refused(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
    assert meeting.refused().endswith("at north: mailroom link moved south")


def test_reader_in_another_database_is_refused(meeting: Meeting) -> None:
    meeting.hello()
    for column in ("reader_system_id", "reader_database_oid"):
        meeting.source.connection.execute(f"UPDATE mailroom.link SET {column} = {column} + 1".encode())
        assert "reads from another database or server" in (line := meeting.refused()), column
        assert line.endswith("at north: mailroom link moved south")
        meeting.source.connection.execute(f"UPDATE mailroom.link SET {column} = {column} - 1".encode())
    meeting.hello()


def test_source_in_another_database_than_it_has_noted_is_refused(meeting: Meeting) -> None:
    for column in ("system_id", "database_oid"):
        note_place(meeting.source, **{column: 1})
        assert meeting.refused().endswith("at north: mailroom node moved, or for a copy mailroom node new-id"), column


def test_lower_timeline_of_the_same_server_is_refused(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute("UPDATE mailroom.origin SET timeline = timeline + 1")
    assert "an old primary" in (line := meeting.refused())
    assert line.endswith("at south: mailroom link moved north")


def test_lower_timeline_of_another_server_is_none_of_the_same_history(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute("UPDATE mailroom.origin SET timeline = timeline + 1, system_id = system_id + 1")
    timeline = meeting.hello().place.timeline
    assert meeting.origin.timeline == timeline


def test_lower_incarnation_is_refused(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute("UPDATE mailroom.origin SET incarnation = 3")
    assert meeting.refused().endswith("at north: mailroom node restored --above 3")


def test_of_a_new_link_the_incarnation_is_noted(meeting: Meeting) -> None:
    meeting.hello()
    meeting.source.connection.execute("UPDATE mailroom.node SET incarnation = 2")
    meeting.source.connection.execute("DELETE FROM mailroom.link")
    meeting.allow()
    meeting.hello()
    assert meeting.origin.incarnation == 2


def test_higher_incarnation_is_told_and_left_to_whoever_brings_the_receipts_there(meeting: Meeting) -> None:
    meeting.hello()
    meeting.source.connection.execute("UPDATE mailroom.node SET incarnation = 2")
    assert meeting.hello().incarnation == 2
    assert meeting.origin.incarnation == 1


def test_lower_link_than_pinned_is_refused(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute("UPDATE mailroom.origin SET link = link + 1")
    assert meeting.refused().endswith("at north: mailroom link remove south, then mailroom link allow south")


def test_source_that_was_removed_and_added_again_is_refused_until_the_link_is_a_new_one(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute("DELETE FROM mailroom.origin")
    meeting.add()
    assert "has forgotten what it received" in (line := meeting.refused())
    assert line.endswith("at north: mailroom link remove south, then mailroom link allow south")
    meeting.source.connection.execute("DELETE FROM mailroom.link")
    meeting.allow()
    meeting.hello()


def test_reader_that_was_put_back_to_before_its_first_hello_is_not_refused(meeting: Meeting) -> None:
    meeting.hello()
    meeting.target.connection.execute(
        "UPDATE mailroom.origin SET (id, incarnation, system_id, timeline, link) = (NULL, NULL, NULL, NULL, NULL)"
    )
    meeting.hello()


def test_second_link_of_one_reader_is_refused(meeting: Meeting) -> None:
    """Both would carry the same messages."""
    meeting.hello()
    meeting.source.connection.execute("INSERT INTO mailroom.link (name) VALUES ('tours')")
    meeting.target.connection.execute("UPDATE mailroom.origin SET name = 'east'")
    meeting.add()
    meeting.target.connection.execute("DELETE FROM mailroom.origin WHERE name = 'east'")
    meeting.target.connection.execute("UPDATE mailroom.origin SET reader = 'tours'")
    assert meeting.refused().endswith("at north: mailroom link remove south, or mailroom link remove tours")


def test_version_of_the_columns_that_this_release_does_not_read_is_refused(meeting: Meeting) -> None:
    meeting.source.connection.execute("UPDATE mailroom.node SET wire = 2")
    assert meeting.refused().endswith("at south: pip install --upgrade pg-mailroom, then mailroom migrate")


def test_other_encoding_of_the_reader_is_refused(meeting: Meeting) -> None:
    party = replace(meeting.party, encoding="LATIN1")
    with pytest.raises(LinkRefused, match="encoding LATIN1") as raised, meeting.source.connection.transaction():
        run(meeting.source.connection, greeting(SCHEMA, "north", party, meeting.origin.pinned, uuid4()))
    assert raised.value.at == "south"


@pytest.mark.slow
def test_other_encoding_of_the_source_is_refused(meeting: Meeting, databases: Any) -> None:
    latin = databases.create(migrated=False)
    name = latin.rpartition("/")[2].partition("?")[0]
    admin = psycopg.connect(databases.dsn, autocommit=True)
    admin.execute(f"DROP DATABASE {name}".encode())
    admin.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'".encode())
    try:
        with psycopg.connect(latin, autocommit=True) as connection:
            with connection.transaction():
                migrate(connection)
            meeting.source = Node(latin, connection)
            meeting.allow()
            note_place(meeting.source)
            connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
            assert "has the encoding LATIN1" in meeting.refused()
    finally:
        admin.close()
        databases.drop(latin)


def test_error_keeps_its_parts_when_it_is_pickled(meeting: Meeting) -> None:
    error = LinkRefused("reason", "north", "mailroom link allow south", code="MR-link-not-allowed")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- Whose the link is ------------------------------------------------------------------------------------------------


def test_later_run_has_the_link(meeting: Meeting) -> None:
    first, second = uuid4(), uuid4()
    link = meeting.hello(first).link
    assert meeting.hello(second).taken_from == first
    assert meeting.hello(second).taken_from is None
    with pytest.raises(LinkTaken):
        run(meeting.source.connection, matching(SCHEMA, link, first))
    with pytest.raises(LinkTaken):
        run(meeting.source.connection, asking_topics(SCHEMA, link, first, ["order"]))
    with pytest.raises(LinkTaken):
        run(meeting.source.connection, asking_topics(SCHEMA, link, first, []))  # as it is: not its word to give
    assert meeting.link("matched") == [(None,)]
    assert meeting.source.rows("SELECT topic FROM mailroom.link_topic") == []
    assert run(meeting.source.connection, matching(SCHEMA, link, second))


def test_of_two_hellos_at_once_the_one_that_waited_has_the_link(meeting: Meeting) -> None:
    first, second = uuid4(), uuid4()
    origin, party = meeting.origin, meeting.party
    with psycopg.connect(meeting.source.dsn) as one, psycopg.connect(meeting.source.dsn) as other:
        run(one, greeting(SCHEMA, "north", party, origin.pinned, first))
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(run, other, greeting(SCHEMA, "north", party, origin.pinned, second))
            wait_until_blocked(meeting.source.connection, other.info.backend_pid)
            one.commit()
            assert waiting.result().taken_from == first
        other.commit()
    assert meeting.link("run") == [(second,)]


def test_of_two_first_hellos_at_once_by_two_nodes_the_second_is_refused(meeting: Meeting) -> None:
    """The one that waited must see what the first one noted."""
    origin, party = meeting.origin, meeting.party
    stranger = replace(party, id=uuid4())
    with psycopg.connect(meeting.source.dsn) as one, psycopg.connect(meeting.source.dsn) as other:
        run(one, greeting(SCHEMA, "north", party, origin.pinned, uuid4()))
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(run, other, greeting(SCHEMA, "north", stranger, origin.pinned, uuid4()))
            wait_until_blocked(meeting.source.connection, other.info.backend_pid)
            one.commit()
            with pytest.raises(LinkRefused, match="another node"):
                waiting.result()
    assert meeting.link("reader_id") == [(party.id,)]


def test_link_that_is_taken_in_turns_is_reported() -> None:
    rivals = Rivals()
    assert [rivals.lost(at) for at in (0, 400, 500, 600, 700, 1_100)] == [False, False, False, True, True, False]


# -- Topics -----------------------------------------------------------------------------------------------------------


def test_source_stamps_what_the_reader_subscribes_to_and_nothing_else(meeting: Meeting) -> None:
    target = meeting.target
    for name in ("here", "there", "everywhere"):
        target.inbox(name)
    target.connection.execute(
        "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('own', 'here', ''), "
        "('paid', 'there', 'north'), "
        "('paid', 'everywhere', 'north'), ('order.#', 'everywhere', '*'), ('far', 'there', 'west')"
    )
    assert run(target.connection, wanted_topics(SCHEMA, "north")) == ["order.#", "paid"]


def test_topics_are_changed_where_they_differ(meeting: Meeting) -> None:
    run_id = uuid4()
    link = meeting.hello(run_id).link

    def ask(*topics: str) -> set[str]:
        return {*run(meeting.source.connection, asking_topics(SCHEMA, link, run_id, topics))}

    def there() -> dict[str, str]:
        return dict(meeting.source.rows("SELECT topic, xmin::text FROM mailroom.link_topic"))

    meeting.source.connection.execute("INSERT INTO mailroom.link_topic (topic, link) VALUES ('other', %s)", [link + 1])
    assert ask("order.*", "paid") == {"order.*", "paid"}
    first = there()
    assert set(first) == {"order.*", "paid", "other"}
    assert ask("paid", "order.*") == {"order.*", "paid"}
    assert there() == first
    assert ask("paid", "sent") == {"paid", "sent"}
    assert set(there()) == {"paid", "sent", "other"}
    assert there()["paid"] == first["paid"]
    assert ask() == set()
    assert set(there()) == {"other"}


def test_dispatcher_of_the_source_does_not_wait_for_a_reader(meeting: Meeting) -> None:
    run_id = uuid4()
    link = meeting.hello(run_id).link
    meeting.source.inbox("shipping", "order")
    meeting.source.allow_clocks()
    meeting.source.send("order", key="k")
    origin, party = meeting.origin, meeting.party
    with psycopg.connect(meeting.source.dsn) as reader:
        run(reader, greeting(SCHEMA, "north", party, origin.pinned, run_id))
        run(reader, asking_topics(SCHEMA, link, run_id, ["order"]))
        run(reader, matching(SCHEMA, link, run_id))
        with meeting.source.connection.transaction():
            meeting.source.connection.execute("SET LOCAL lock_timeout = '1s'")
            assert meeting.source.deliver().delivered == 1


# -- The state of an origin -------------------------------------------------------------------------------------------


def test_origin_is_stopped_with_a_reason_and_opened_again(meeting: Meeting) -> None:
    number, connection = meeting.origin.number, meeting.target.connection
    assert not run(connection, opening(SCHEMA, number))
    assert run(connection, stopping(SCHEMA, number, "because"))
    assert not run(connection, stopping(SCHEMA, number, "because"))
    assert (meeting.origin.state, meeting.origin.why) == ("stopped", "because")
    assert run(connection, stopping(SCHEMA, number, "for another reason"))
    assert run(connection, opening(SCHEMA, number))
    assert (meeting.origin.state, meeting.origin.why) == ("open", None)


def test_excluded_origin_stays_excluded(meeting: Meeting) -> None:
    number, connection = meeting.origin.number, meeting.target.connection
    connection.execute("UPDATE mailroom.origin SET state = 'excluded'")
    assert not run(connection, stopping(SCHEMA, number, "because"))
    assert not run(connection, opening(SCHEMA, number))
    assert meeting.origin.state == "excluded"
