"""The pipeline: a few flights from the CSV to Parquet and back, as `make pipeline` runs all of them."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(240)
def test_flights_come_out_as_they_went_in(empty_dsn: str) -> None:
    command = [sys.executable, "-m", "examples.pipeline", "--flights", "3000", "--json", "--dsn", empty_dsn]
    # As users run it: with Spark's own processes of Python, which the other tests replace.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAILROOM_DSN", "PYSPARK_PYTHON")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["flights"] == 3000
    assert len(told["checks"]) == 14
    assert all(check["ok"] for check in told["checks"])
    assert "SIGKILL to the dispatcher" in ended.stderr
    assert "nothing happened" in ended.stderr
