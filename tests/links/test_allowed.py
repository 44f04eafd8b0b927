"""What a reader may ask for is the source's word: the topics, and who gets its commands."""

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from dispatcher.links import lane, visit
from mailroom import Links
from mailroom.errors import ConfigurationError, InvalidMessage, NotSubscribed
from tests.links.test_links import audited, do
from tests.links.test_told import follow, reader, running, stamped, wait
from tests.support.command import done, json_of, mailroom
from tests.support.node import Node
from tests.support.waiting import eventually_async, wait_until_blocked

__all__ = ["reader"]  # the fixture


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "FOLLOW_S", 0.05)
    monkeypatch.setattr(visit, "MATCH_S", 0.05)


ASK = "INSERT INTO mailroom.link_topic (topic, link) SELECT %s, number FROM mailroom.link WHERE name = %s"


def topics(node: Node) -> list[Any]:
    return node.rows("SELECT topic, commands FROM mailroom.link_topic ORDER BY topic")


# -- What is allowed --------------------------------------------------------------------------------------------------


def fits(pattern: str, topic: str) -> bool:
    """Return whether a topic fits a pattern, by docs/guides/routing.md."""
    words, given = pattern.split("."), topic.split(".")
    if words[-1] == "#":
        return given[: len(words) - 1] == words[:-1]
    return len(words) == len(given) and all(word in ("*", of) for word, of in zip(words, given, strict=True))


def test_pattern_is_allowed_by_one_that_fits_all_that_it_fits(source: Node) -> None:
    every = [".".join(words) for length in (1, 2, 3) for words in itertools.product("ab*", repeat=length)]
    every += ["#", "a.#", "b.#", "a.b.#", "a_b", "aXb", "a_b.*", "aXb.c"]
    plain = [".".join(words) for length in (1, 2, 3, 4) for words in itertools.product("abc", repeat=length)]
    plain += ["a_b", "aXb", "a_b.c", "aXb.c"]
    got = {pattern: {topic for topic in plain if fits(pattern, topic)} for pattern in every}
    do(source, "allow", "lyon")
    with source.connection.transaction():
        for allowed in every:
            source.connection.execute("DELETE FROM mailroom.link_allowed")
            source.connection.execute("INSERT INTO mailroom.link_allowed (link, topic) VALUES (1, %s)", [allowed])
            found: dict[str, bool] = dict(
                source.rows("SELECT t, mailroom.link_allows(1, t) IS NOT NULL FROM unnest(%s::text[]) t", every)
            )
            assert found == {pattern: got[pattern] <= got[allowed] for pattern in every}, allowed


def test_reader_gets_what_it_is_allowed_and_commands_of_topics_by_name(source: Node) -> None:
    do(source, "allow", "lyon", topics=["order.#", "invoice.print"])
    do(source, "allow", "oslo", topics=["invoice.print", "order.paid", "#"])
    do(source, "allow", "rome")
    for name in ("lyon", "oslo", "rome"):
        for topic in ("order.paid", "order.*", "invoice.print", "invoice.*", "secret"):
            source.connection.execute(ASK, [topic, name])
    found = source.rows("SELECT name, topic, commands FROM mailroom.link_topic JOIN mailroom.link ON number = link")
    asked = {name: {(topic, commands) for who, topic, commands in found if who == name} for name, _, _ in found}
    assert asked == {
        "lyon": {("order.paid", False), ("order.*", False), ("invoice.print", True)},
        "oslo": {
            ("order.paid", True), ("order.*", False), ("invoice.print", False), ("invoice.*", False), ("secret", False),
        },
        "rome": {(t, False) for t in ("order.paid", "order.*", "invoice.print", "invoice.*", "secret")},
    }  # fmt: skip
    states = {each.name: (each.allowed, each.commands) for each in do(source, "status").readers}
    assert states["lyon"] == (("invoice.print", "order.#"), ("invoice.print",))
    assert states["rome"] == ((), ())


def test_settings_of_topics_replace_those_before_and_hold_for_what_was_asked(source: Node) -> None:
    do(source, "allow", "lyon")
    for topic in ("a", "b.*", "c"):
        source.connection.execute(ASK, [topic, "lyon"])
    do(source, "set", "lyon", topics=["a", "c"])
    assert topics(source) == [("a", True), ("c", True)]
    do(source, "set", "lyon", keep_s=60)
    assert topics(source) == [("a", True), ("c", True)]
    do(source, "set", "lyon", topics="#")
    assert topics(source) == [("a", False), ("c", False)]
    with pytest.raises(ConfigurationError, match="'#' for all"):
        do(source, "set", "lyon", topics=[])
    with pytest.raises(InvalidMessage):
        do(source, "set", "lyon", topics="#.a")
    assert len(audited(source)) == 4


@pytest.mark.parametrize("first", ["the reader", "the source"])
def test_reader_that_asks_while_it_is_limited_gets_no_more(source: Node, first: str) -> None:
    do(source, "allow", "lyon")

    def ask(session: psycopg.Connection) -> None:
        session.execute(ASK, ["secret", "lyon"])

    def limit(session: psycopg.Connection) -> None:
        Links().set(session, "lyon", topics="order.#", actor="ada")

    steps = [ask, limit] if first == "the reader" else [limit, ask]
    with psycopg.connect(source.dsn) as one, psycopg.connect(source.dsn) as other, ThreadPoolExecutor(1) as thread:
        steps[0](one)
        waiting = thread.submit(steps[1], other)
        wait_until_blocked(source.connection, other.info.backend_pid)
        one.commit()
        waiting.result()
        other.commit()
    assert topics(source) == []


# -- Who is refused is told -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_reader_is_told_what_it_is_refused_until_it_is_allowed(source: Node, reader: Node) -> None:
    do(source, "set", "lyon", topics="order.#")
    follow(reader, "order.paid", "secret")
    async with running(reader):
        with pytest.raises(NotSubscribed, match="paris does not allow secret to this node"):
            await asyncio.to_thread(wait, reader)
        await asyncio.to_thread(wait, reader, topics="order.paid")
        [shown] = json_of("link", "status", dsn=reader.dsn, exit_code=1)["sources"]
        assert (shown["state"], shown["refused"], shown["pending"]) == ("open", ["secret"], [])
        said = done("link", "status", dsn=reader.dsn, exit_code=1)
        assert "secret (refused)" in said
        assert "does not allow secret; there: mailroom link set lyon --topics" in said
        source.send("order.paid", key="k")
        await asyncio.to_thread(source.deliver_all)
        await eventually_async(lambda: reader.delivered("key") == [("k",)])
        do(source, "set", "lyon", topics=["order.#", "secret"])
        await eventually_async(lambda: stamped(source) == ["order.paid", "secret"])
        await eventually_async(lambda: reader.rows("SELECT FROM mailroom.origin WHERE refused = '{}'"))
        do(source, "set", "lyon", topics="secret")
        await eventually_async(lambda: reader.rows("SELECT FROM mailroom.origin WHERE cardinality(refused) = 1"))


# -- By command -------------------------------------------------------------------------------------------------------


def test_command_allows_topics_and_says_whose_commands_are_whose(source: Node) -> None:
    done("link", "allow", "lyon", "--topics", "order.#", "--topics", "print", "--actor", "ada", dsn=source.dsn)
    said = mailroom("link", "allow", "oslo", "--topics", "print", "--actor", "ada", dsn=source.dsn)
    assert said.stderr == "Commands and replies of print go to lyon, which was allowed them first.\n"
    lines = [" ".join(line.split()) for line in done("link", "status", dsn=source.dsn).splitlines()]
    assert "lyon may ask for order.#, print; commands and replies of print" in lines
    assert "oslo may ask for print" in lines
    wrong = mailroom("link", "allow", "lyon", "--topics", "#.a", "--actor", "ada", dsn=source.dsn)
    assert wrong.exit_code == 2
