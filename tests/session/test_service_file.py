"""libpq's service file, as libpq reads it."""

from pathlib import Path

import pytest

from mailroom.session.service_file import service_entry

FILE = """
# options=of nobody
[first]
host=one
 options=-c role=reader -c a=b
host=two
#port=1
[second]
port=2
[first]
user=nobody
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "own").write_text(FILE)
    (tmp_path / "pg_service.conf").write_text("[second]\nport=3\n[third]\nport=4\n")
    return {"PGSERVICEFILE": str(tmp_path / "own"), "PGSYSCONFDIR": str(tmp_path)}


def test_entry_ends_at_the_next_one_and_its_first_values_count(environment: dict[str, str]) -> None:
    assert service_entry("first", environment) == {"host": "one", "options": "-c role=reader -c a=b"}


def test_entry_of_one_s_own_comes_before_one_that_all_share(environment: dict[str, str]) -> None:
    assert service_entry("second", environment) == {"port": "2"}
    assert service_entry("third", environment) == {"port": "4"}


def test_environment_names_an_entry_too(environment: dict[str, str]) -> None:
    assert service_entry("", environment) == {}
    assert service_entry("", environment | {"PGSERVICE": "second"}) == {"port": "2"}


def test_what_is_not_there_says_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    assert service_entry("fourth", environment) == {}
    assert service_entry("first", {"PGSERVICEFILE": str(tmp_path / "none")}) == {}
