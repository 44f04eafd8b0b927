"""Decisions stand in docs/decisions, by room: code cites them where somebody would simplify it, and cites no others."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.pages import DECISIONS, ROOT

ID = re.compile(r"\bD-[a-z]+-[0-9]+\b")
ENTRY = re.compile(r"^## (?P<id>\S+): (?P<title>.+)\n(?P<text>(?:(?!## ).*\n)*)", re.MULTILINE)
LIVES_IN = re.compile(r"^- Lives in: (?P<places>.+)\.$", re.MULTILINE)
ROOMS = ("alembic", "benchmarks", "dispatcher", "examples", "inbox", "mailroom", "outbox", "spark_jobs", "tests")
LINES = 200  # of ARCHITECTURE.md, which is read in ten minutes


def cited() -> Iterator[tuple[str, str, str]]:
    """What each citation of the code is of, the rest of its line, and where it is."""
    for path in (path for room in ROOMS for kind in ("py", "sql") for path in (ROOT / room).rglob(f"*.{kind}")):
        for line in path.read_text().splitlines() if path != Path(__file__) else ():
            for match in ID.finditer(line):
                yield match[0], line[match.end() :].removeprefix(": ").removesuffix("."), str(path.relative_to(ROOT))


def test_code_cites_each_decision_by_its_title_and_no_others() -> None:
    entries = {match["id"]: match for page in DECISIONS.glob("*.md") for match in ENTRY.finditer(page.read_text())}
    citations = list(cited())
    assert [each for each in citations if each[0] not in entries or each[1] != entries[each[0]]["title"]] == []
    somewhere = {id for id, _, _ in citations}
    for id, entry in entries.items():
        lives_in = LIVES_IN.search(entry["text"])
        assert (lives_in is None) == (id in somewhere), f"{id} is cited in code, or says where it lives"
        places = re.findall(r"`([^`]+)`", lives_in["places"]) if lives_in else []
        assert all((ROOT / place).exists() for place in places), f"{id} lives in {places}"
        assert "\n- Instead of: " in entry["text"], f"{id} says instead of what it is"
        assert set(ID.findall(entry["text"])) <= entries.keys(), f"{id} names others"


def test_ids_are_of_the_room_of_their_page_and_given_once() -> None:
    for page in DECISIONS.glob("*.md"):
        ids = re.findall(r"^## ([^:\n]+)", page.read_text(), re.MULTILINE)
        numbers = [int(re.fullmatch(rf"D-{page.stem}-([1-9][0-9]*)", id)[1]) for id in ids]  # type: ignore[index]
        assert numbers == sorted(set(numbers)), f"{page.name}: {ids}"


def test_the_index_has_each_room_and_stays_short() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert set(re.findall(r"\(docs/decisions/(\S+)\)", text)) == {page.name for page in DECISIONS.glob("*.md")}
    assert len(text.splitlines()) <= LINES, "a decision stands in docs/decisions"
