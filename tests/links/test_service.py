"""How a source is reached: nothing secret is stored, and what is missing is named."""

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from mailroom.errors import ConfigurationError
from mailroom.links.service import source_dsn, variable
from mailroom.session import settings


def test_variable_of_a_source() -> None:
    names = ["MAILROOM_DSN_PARIS", "MAILROOM_DSN_EU_WEST_2_A", "MAILROOM_DSN_X1"]
    assert [variable(source) for source in ("paris", "eu-west.2_a", "X1")] == names


def test_environment_leads_to_a_source_without_a_service() -> None:
    environment = {"MAILROOM_DSN_EU_WEST": "postgresql+psycopg://me@host/db", "MAILROOM_DSN": "postgresql://other/db"}
    assert source_dsn("eu-west", None, environment) == "postgresql://me@host/db"


def test_missing_way_to_a_source_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"set MAILROOM_DSN_PARIS .* mailroom link set paris --service ENTRY"):
        source_dsn("paris", None, {"MAILROOM_DSN": "postgresql://other/db", "PGDATABASE": "db"})


def test_bad_text_in_the_environment_is_named_by_its_variable_and_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match="MAILROOM_DSN_PARIS") as raised:
        source_dsn("paris", None, {"MAILROOM_DSN_PARIS": "postgresql://me:se@cret@host/db"})
    assert "cret" not in str(raised.value)


def test_service_is_an_entry_of_libpq_s_file(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = "\n".join(f"{name}={value}" for name, value in conninfo_to_dict(dsn).items())
    (tmp_path / "services").write_text(f"[head office]\n{entries}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with psycopg.connect(source_dsn("paris", "head office", {})) as connection:
        assert connection.info.dbname == conninfo_to_dict(dsn)["dbname"]


def test_session_keeps_what_the_entry_says_beside_our_own_settings(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the role to take on: without it a session might do more, or less, than it is meant to."""
    values = conninfo_to_dict(dsn) | {"options": "-c role=pg_monitor -c jit=on", "keepalives_idle": "77"}
    entries = "\n".join(f"{name}={value}" for name, value in values.items())
    (tmp_path / "services").write_text(f"[head office]\n{entries}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with settings.connect(source_dsn("paris", "head office", {}), "links") as connection:
        assert connection.execute("SELECT current_user::text, current_setting('jit')").fetchone() == (
            "pg_monitor", "off",
        )  # fmt: skip
        assert connection.info.get_parameters()["keepalives_idle"] == "77"


def test_what_cannot_be_an_entry_is_refused() -> None:
    for service in ("", "a]", "a\n", "host=h", "postgresql://h/db"):
        with pytest.raises(ConfigurationError):
            source_dsn("paris", service, {"MAILROOM_DSN_PARIS": "postgresql://h/db"})
