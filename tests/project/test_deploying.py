"""The templates for systemd and Kubernetes: their commands exist, and their probes ask what is answered."""

import shlex
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from mailroom.cli.root import root
from mailroom.metrics.endpoint import PATHS
from tests.support.pages import FILES

DEPLOYMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()))
STOPS_WITHIN_S = 10  # tests/dispatcher/test_lease.py


def check_command(words: list[str]) -> dict[str, Any]:
    """Parse a command as `mailroom` would, down to its options; returns those."""
    command: click.Command = root
    context = click.Context(root, **root.context_settings)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
        context = click.Context(command, parent=context, info_name=name)
    assert context.parent is not None
    return command.make_context(name, words, parent=context.parent).params


def test_unit_starts_probes_and_stops_a_dispatcher() -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((FILES / "mailroom-dispatcher.service").read_text())
    service = unit["Service"]
    for name in ("ExecStart", "ExecStartPost"):
        program, *words = shlex.split(service[name])
        assert Path(program).name == "mailroom"
        check_command(words)
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > STOPS_WITHIN_S
    assert "MAILROOM_METRICS" in service["Environment"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["metadata"]["name"])
def test_deployment_has_a_command_that_exists_and_probes_that_are_answered(deployment: dict[str, Any]) -> None:
    spec = deployment["spec"]
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > STOPS_WITHIN_S
    [container] = pod["containers"]
    words = container.get("args") or container["command"][1:]
    assert check_command(words)["address"] == ":9464"
    [port] = container["ports"]
    assert port["containerPort"] == 9464
    assert spec["template"]["metadata"]["annotations"]["prometheus.io/port"] == "9464"
    asked = {kind: container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert [each["path"] for each in asked.values()] == ["/startupz", "/readyz", "/livez"]
    assert {each["path"] for each in asked.values()} <= set(PATHS)
    assert {each["port"] for each in asked.values()} == {port["name"]}
