"""Where a session finds PostgreSQL's JDBC driver."""

from pathlib import Path

import pytest

from mailroom.errors import ConfigurationError
from spark_jobs import session
from spark_jobs.session import jdbc_config, jdbc_jar


def test_jar_that_is_named_goes_before_debians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debians, named = tmp_path / "debian.jar", tmp_path / "named.jar"
    monkeypatch.setattr(session, "DEBIANS_JAR", debians)
    assert (jdbc_jar({}), jdbc_config({})) == (None, {})
    debians.touch()
    named.touch()
    assert jdbc_jar({}) == debians
    assert jdbc_config({"MAILROOM_JDBC_JAR": str(named)}) == {"spark.jars": str(named)}


def test_jar_that_is_named_and_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"MAILROOM_JDBC_JAR names .*gone\.jar, which is not a file"):
        jdbc_jar({"MAILROOM_JDBC_JAR": str(tmp_path / "gone.jar")})
