"""Random handlers and operators, killed at every statement: each command gets the answers that the contract says.

A step is one transaction of a worker or of an operator. It is killed before its first statement, before its second, and
so on, until it gets through. A killed step has changed no command and no answer. One that got through has moved some
commands, and what it moved says which answers there must be now.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from inbox import Handlers, Message, Park, Parked, Reject, Skip
from inbox.by_key.claim import Share
from inbox.claims import Claims
from inbox.handling.batch import Batch
from inbox.handling.blame import blaming
from inbox.sessions.hold import COMMIT
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import PlainCursor, run
from mailroom.testing import deliver
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node

OUTBOX, LETTERS = Outbox(), DeadLetters()
INBOXES = {"parking": "park", "skipping": "skip"}
GOOD = ["return", "return and send", "reject"]
FATES = [*GOOD, "fail", "skip", "park", "swallow"]  # those of a batch with trouble
# How each command ended; where it waits it is none of these. Dead letters that no inbox had are not ended.
WHERE = """
SELECT message_id::text, 'waits' FROM mailroom.inbox WHERE inbox <> 'answers'
UNION ALL SELECT message_id::text, 'waits' FROM mailroom.outbox WHERE kind = 'C'
UNION ALL SELECT message_id::text, 'parked' FROM mailroom.parked
UNION ALL SELECT message_id::text, stage FROM mailroom.dead_letter
"""
ANSWERS = """
SELECT headers ->> 'correlation', (headers ->> 'status')::int, value, value_json FROM mailroom.outbox WHERE kind = 'R'
UNION ALL SELECT headers ->> 'correlation', (headers ->> 'status')::int, value, value_json FROM mailroom.inbox
WHERE inbox = 'answers'
"""


class Killed(BaseException):
    """The process died: its transaction is rolled back, and none of its code runs on."""


@dataclass
class Failpoint:
    """Kills a session before its statement number `at`, once armed."""

    connection: object = None
    at: int = 0
    seen: int = 0

    @contextmanager
    def armed(self, connection: object, at: int) -> Iterator[None]:
        self.connection, self.at, self.seen = connection, at, 0
        try:
            yield
        finally:
            self.connection = None

    def pass_by(self, connection: object) -> None:
        if connection is self.connection:
            self.seen += 1
            if self.seen == self.at:
                raise Killed


@pytest.fixture
def failpoint(monkeypatch: pytest.MonkeyPatch) -> Failpoint:
    failpoint = Failpoint()
    execute = psycopg.Cursor.execute

    def counted(cursor: Any, *arguments: Any, **options: Any) -> Any:
        failpoint.pass_by(cursor.connection)
        return execute(cursor, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    return failpoint


@dataclass
class World:
    """The node, the fates that handlers are to have, and the answers that there must be."""

    node: Node
    connection: psycopg.Connection[Any]
    other: psycopg.Connection[Any]  # where failures are recorded
    draw: random.Random
    fates: dict[str, str] = field(default_factory=dict)
    asks: dict[str, bool] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)

    def where(self) -> dict[str, str]:
        return dict(self.node.rows(WHERE))

    def answers(self) -> dict[str, int]:
        rows = self.node.rows(ANSWERS)
        assert len({row[0] for row in rows}) == len(rows), "a command has two answers"
        return {correlation: status for correlation, status, *_ in rows}

    # -- Steps --------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        for _ in range(self.draw.randint(1, 4)):
            reply_to = self.draw.choice([*["answered"] * 5, "no topic", None])
            topic = self.draw.choice([*list(INBOXES) * 3, "nowhere"])
            headers = {} if reply_to is None else {"reply_to": reply_to}
            id = self.node.send(topic, None, kind="C", key=self.draw.choice("abcdefgh"), headers=headers)
            self.asks[str(id)] = reply_to == "answered"
        with self.node.connection.transaction():
            deliver(self.node.connection)

    def work(self, handlers: Handlers) -> None:
        """Do what a worker does with one batch, in the very steps of `Worker`."""
        inbox = Claims(SCHEMA, self.draw.choice([*INBOXES]))
        batch = Batch(due=self.draw.random() < 0.5, size=4)
        claiming = inbox.claiming_due(4, hold=True) if batch.due else inbox.claiming(Share(4, 4, 4, False, True))
        claimed = run(self.connection, claiming)
        batch.take(claimed, run(self.connection, inbox.looking_up()), self.connection)
        if batch.taken is None or not batch.messages:
            self.connection.commit()
            return
        try:
            with batch.run.handling(batch.taken) as messages:
                for message in messages:
                    handlers(message, self.connection)
            run(self.connection, batch.ending())
            with PlainCursor(self.connection) as cursor:
                cursor.execute(COMMIT)
        except Exception as error:
            with self.other.transaction():
                run(self.other, blaming(batch, error, ()))
            self.connection.rollback()

    def replay(self) -> None:
        Parked(self.draw.choice([*INBOXES])).replay(self.connection, None, limit=1, actor="ada")
        self.connection.commit()

    def discard(self) -> None:
        some = self.draw.choice([1, None])
        Parked(self.draw.choice([*INBOXES])).discard(self.connection, self._key(), per_key=some, actor="ada")
        self.connection.commit()

    def discard_letters(self) -> None:
        LETTERS.discard(self.connection, None, limit=2, actor="ada")
        self.connection.commit()

    def requeue(self) -> None:
        LETTERS.requeue(self.connection, None, limit=2, actor="ada")
        deliver(self.connection)
        self.connection.commit()

    def _key(self) -> str:
        return self.draw.choice("abcdefgh")

    # -- The contract -------------------------------------------------------------------------------------------------

    def judge(self, step: str, before: dict[str, str]) -> None:
        """Derive from what the step moved which answers there must be now, and compare."""
        now = self.where()
        for id in self.asks:
            was, is_ = before.get(id), now.get(id)
            if was is None or was == is_ or not self.asks[id] or id in self.expected:
                continue
            if is_ == "reap" or (is_ is None and step in ("discard", "discard_letters")):
                self.expected[id] = 500
            elif is_ is None:
                self.expected[id] = 400 if self.fates[id] == "reject" else 200
        assert self.answers() == self.expected


def handlers_of(world: World) -> Handlers:
    handlers = Handlers()

    @handlers.on("#")
    def handle(message: Message, connection: psycopg.Connection[Any]) -> str | None:
        fate = world.fates[str(message.id)]
        connection.execute("INSERT INTO effect VALUES (%s, %s)", [message.id, fate])
        match fate:
            case "reject":
                OUTBOX.publish(connection, "noise", None)
                raise Reject("no")
            case "fail":
                raise ValueError("kanarienvogel")
            case "skip":
                raise Skip("kanarienvogel")
            case "park":
                raise Park("kanarienvogel")
            case "swallow":
                with pytest.raises(psycopg.errors.DivisionByZero):
                    connection.execute("SELECT 1 / 0")
            case "return and send":
                OUTBOX.publish(connection, "noise", None)
        return "done"

    return handlers


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_each_command_has_the_answers_that_the_contract_says(
    dsn: str, connect: Connect, failpoint: Failpoint, seed: int
) -> None:
    node = Node(dsn, connect(autocommit=True))
    node.inbox("answers", "answered")
    for inbox, on_failure in INBOXES.items():
        node.inbox(inbox, backoff_s=0, max_attempts=2, on_failure=on_failure)
    node.connection.execute("CREATE TABLE effect (id uuid, fate text)")
    world = World(node, connect(), connect(autocommit=True), random.Random(seed))
    handlers = handlers_of(world)
    steps: list[tuple[str, Callable[[], None]]] = [
        *[("work", lambda: world.work(handlers))] * 5,
        ("replay", world.replay),
        ("discard", world.discard),
        ("discard_letters", world.discard_letters),
        ("requeue", world.requeue),
    ]
    kills = 0
    for _ in range(40):
        world.send()
        name, step = world.draw.choice(steps)
        fates = world.draw.choice([GOOD, FATES])
        world.fates = {id: world.draw.choice(fates) for id in world.asks}
        chosen = world.draw.getstate()
        at = 1
        while True:
            before = world.where()
            world.draw.setstate(chosen)  # the same step again
            with failpoint.armed(world.connection, at):
                try:
                    step()
                    break
                except Killed:
                    world.connection.rollback()
            assert (world.where(), world.answers()) == (before, world.expected)
            kills, at = kills + 1, at + 1
        world.judge(name, before)
    assert kills > 100
    assert set(world.expected.values()) == {200, 400, 500}
    found = node.rows(ANSWERS)
    assert "kanarienvogel" not in repr(found)
    # What was rejected has left nothing, and what was answered 200 has left its work.
    effects = {(str(id), fate) for id, fate in node.rows("SELECT id, fate FROM effect")}
    assert not [each for each in effects if each[1] not in ("return", "return and send")]
    assert {id for id, status in world.expected.items() if status == 200} <= {id for id, _ in effects}
