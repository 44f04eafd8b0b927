"""README's table of guarantees, docs/understand/guarantees.md and the glossary say the same, and what the code has.

What pages count or list (promises, invariants, lanes, stages, outcomes) is compared between them and with the code, so
that none of them changes alone.
"""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import get_args

from dispatcher.daemon import Dispatcher, Executor, Totals
from dispatcher.links.lane import LinksLane
from inbox.by_key.failure import Outcome as Attempted
from mailroom.bridges.broker import brokers
from mailroom.figures.leaders import Role
from mailroom.message.outgoing import EventType, Kind, MessageType
from mailroom.node.dead_letter import Stage
from mailroom.session.commit import Outcome as Committed
from mailroom.sql.sqlstate import Meaning
from outbox.executable import Act
from tests.faults.links.mutants import MUTANTS as LINK_MUTANTS
from tests.faults.mutants import MUTANTS
from tests.support.pages import page_named

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUARANTEES = page_named("guarantees.md").read_text()
GLOSSARY = page_named("glossary.md").read_text()
SCOPE = "within a node and over links between nodes"
PROMISE = re.compile(
    r"^\*\*(?:G(?P<number>\d+), )?(?P<name>[^*]+)\.\*\*(?P<text>.*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL
)
INVARIANT = re.compile(r"\bI\d+\b")
SECONDS = re.compile(r"\b\d+ s\b")
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def section(page: str, heading: str) -> str:
    _, found, rest = page.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def rows(text: str) -> dict[str, str]:
    """Return the rows of the tables in a text: by its first cell all that follows."""
    cells = [line.strip("|").split("|", 1) for line in text.splitlines() if line.startswith("|")]
    return {first.strip(): rest.strip() for first, rest in cells if not first.startswith("---")}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def word(name: str) -> str:
    """Return what the glossary says of a word."""
    return rows(GLOSSARY)[name]


def promises() -> dict[str, re.Match[str]]:
    found = {match["name"]: match for match in PROMISE.finditer(section(GUARANTEES, "The promises"))}
    assert len(found) == section(GUARANTEES, "The promises").count("\n**"), "a promise is not understood"
    return found


def readme_rows() -> dict[str, str]:
    found = rows(section(README, "Guarantees"))
    assert found.pop("") == "guarantee"
    return found


def invariants() -> list[str]:
    return [name.split()[0] for name in rows(section(GUARANTEES, "Invariants")) if name]


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence lists them."""
    *first, last = names
    return f"{', '.join(first)} or {last}"


def test_the_readme_and_the_page_promise_the_same_in_the_same_order() -> None:
    assert [name.casefold() for name in readme_rows()] == [name.casefold() for name in promises()]


def test_each_broker_has_its_promise_and_the_pages_on_bridges_name_it() -> None:
    table = rows(section(page_named("bridges.md").read_text(), "Guarantees"))
    for broker in (each.name for each in brokers()):
        [_] = [name for name in readme_rows() if name.casefold().startswith(broker)]
        assert [name for name in table if f"--{broker}" in name], broker
        assert broker in word("broker").casefold(), broker


def test_promises_are_numbered_in_order() -> None:
    numbers = [int(match["number"]) for match in promises().values() if match["number"]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_both_say_how_far_the_promises_reach() -> None:
    intro = section(README, "Guarantees").replace("(one schema in one database) ", "").replace("\n", " ")
    assert SCOPE in intro
    assert SCOPE in GUARANTEES.partition("\n## ")[0].replace("\n", " ")


def test_what_takes_how_long_is_the_same_on_both_pages_and_on_the_dispatcher_s() -> None:
    text = {name.casefold(): match["text"] for name, match in promises().items()}
    for name, row in readme_rows().items():
        assert set(SECONDS.findall(row)) <= set(SECONDS.findall(text[name.casefold()])), name
    standby = rows(section(page_named("dispatcher.md").read_text(), "Standby and lease"))
    bounds = {bound for cell in standby.values() for bound in SECONDS.findall(cell)}
    assert bounds == set(SECONDS.findall(text["take-over"])) == set(SECONDS.findall(readme_rows()["Take-over"]))


def test_each_promise_names_invariants_or_tests_that_exist() -> None:
    known = set(invariants())
    for name, match in promises().items():
        tests = [each for each in quoted(match["text"]) if each.startswith("tests/")]
        assert set(INVARIANT.findall(match["text"])) <= known, name
        assert tests or INVARIANT.search(match["text"]), f"{name} names nothing that proves it"
    for path in re.findall(r"`(tests/[\w./]+)`", GUARANTEES):
        assert (ROOT / path).exists(), path


def test_invariants_are_those_that_the_fault_suite_checks() -> None:
    checked = set()
    for file in (ROOT / "tests" / "faults").glob("*.py"):
        if not file.name.startswith("test_"):
            checked |= set(re.findall(r'"([IL]\d+)[a-z]?"', file.read_text()))
    assert set(invariants()) == checked
    assert len(invariants()) == len(checked), "one is listed twice"


def test_rules_that_are_broken_on_purpose_are_those_of_the_campaigns() -> None:
    noticed = rows(GUARANTEES.partition("| broken rule | noticed by |")[2])
    assert len(noticed) == len(MUTANTS)
    for rule, by in noticed.items():
        assert set(by.split(", ")) <= set(invariants()), rule
    assert f"{NUMBERS[len(LINK_MUTANTS)].capitalize()} rules of links are broken on purpose" in GUARANTEES


def test_each_word_of_the_glossary_stands_there_once() -> None:
    words = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    words = [each for part in words if part != "word" for each in part.split(", ")]
    assert sorted(words) == sorted(set(words))


def test_lanes_are_those_of_the_daemon() -> None:
    lanes = list(get_args(Role))
    assert [Dispatcher._role, Executor._role, LinksLane._role] == lanes
    count = NUMBERS[len(lanes)]
    assert ", ".join(lanes) in rows(GLOSSARY), "the glossary lists other lanes"
    assert f"One of these {count}," in word("lane")
    assert f"It has {count} lanes." in page_named("dispatcher.md").read_text()
    assert f"{count} lanes ({', '.join(lanes)})" in page_named("sessions.md").read_text()


def test_stages_of_dead_letters_are_those_of_the_code() -> None:
    stages = get_args(Stage)
    where, _, _ = word("stage").partition(". ")
    assert tuple(quoted(where)) == stages
    table = rows(section(page_named("parked-keys.md").read_text(), "Dead letters"))
    assert {stage for row in table for stage in quoted(row)} == set(stages)
    help_text = page_named("cli.md").read_text().partition("\n## mailroom dead-letter\n")[2].partition("\n## ")[0]
    assert {" ".join(stage.split()) for stage in re.findall(r"\(stage\s+([\w\s]+)\)", help_text)} == set(stages)


def test_codes_of_messages_are_those_of_the_code() -> None:
    for name, codes in (("kind", Kind), ("message type", MessageType), ("event type", EventType)):
        assert tuple(code for code in quoted(word(name)) if len(code) == 1) == get_args(codes), name


def test_outcomes_are_those_of_the_code() -> None:
    said = dict(re.findall(r"Of (?:an? )?([\w ]+): ([^.]+)\.", word("outcome")))
    delivered = [each.name for each in fields(Totals) if each.name not in ("taken", "carried")]
    assert said["delivery"] == listed(delivered)
    table = rows(section(page_named("dispatcher.md").read_text(), "What happens to a message"))
    assert sorted(table) == sorted(["outcome", *delivered])
    assert set(quoted(said["failed attempt"])) == set(get_args(Attempted))
    assert said["COMMIT"] == listed(get_args(Committed))


def test_meanings_of_errors_are_those_of_the_code() -> None:
    names = [meaning.name.lower().replace("_", "-") for meaning in Meaning]
    assert f"says: {listed(names)}." in word("meaning")


def test_operations_of_executables_are_those_of_the_code() -> None:
    operations = get_args(Act)
    assert f": {listed(operations)}." in word("executable")
    table = rows(section(page_named("executables.md").read_text(), "Operations"))
    assert tuple(re.findall(r"^`(\w+)\(", "\n".join(table), re.MULTILINE)) == operations


def test_attempts_are_as_many_as_an_inbox_has_by_default() -> None:
    [default] = re.findall(
        r"max_attempts +integer +NOT NULL DEFAULT (\d+)", (ROOT / "alembic" / "base" / "05_inbox.sql").read_text()
    )
    assert f"({default}, over about three hours)" in word("attempt")
    assert f"After {default} attempts, over about three hours" in page_named("consuming.md").read_text()
    assert f"up to {default} times over about three hours" in page_named("your-server.md").read_text()
