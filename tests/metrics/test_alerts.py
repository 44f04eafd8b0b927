"""The alert rules and the dashboard: promtool passes them, and all that they name exists."""

import json
import re
import shutil
import subprocess
from importlib import import_module
from typing import Any

import pytest
import yaml

from mailroom.metrics.family import PREFIX
from tests.cli_reference import PAGE as CLI_PAGE
from tests.metrics_page import DASHBOARD, FAMILIES, dashboard, named
from tests.support.pages import FILES

RULES = FILES / "mailroom.rules.yml"

OF_PROMETHEUS = {"instance", "job"}
ALERTS = (
    *(
        "NoLeader",
        "DispatcherLag",
        "ExecutorLag",
        "ConsumerLag",
        "NoConsumer",
        "Stalled",
        "Failing",
        "ParkedKeys",
        "LaneStands",
        "LogHeld",
        "LogLost",
        "DeadLetters",
    ),
    *(
        "OldSnapshot",
        "DeadRows",
        "NotifyQueue",
        "LinkLag",
        "BridgeLag",
        "ClockMargin",
        "PeriodicLate",
        "SampleOld",
        "ErrorBudget",
    ),
)

SELECTOR = re.compile(rf"\b{PREFIX}(?P<name>\w+)(?:{{(?P<matchers>[^}}]*)}})?")
MATCHER = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
GROUPED = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\((?P<labels>[\w\s,]*)\)")


def labels_of(name: str) -> set[str]:
    """The labels of a series by its name, without the prefix. It fails for a series that no metric has."""
    for suffix in ("_bucket", "_sum", "_count"):
        if (family := FAMILIES.get(name.removesuffix(suffix))) and family.kind == "histogram" and name.endswith(suffix):
            return {"node", *family.labels} | OF_PROMETHEUS | ({"le"} if suffix == "_bucket" else set())
    assert name in FAMILIES, f"no metric is called {name}"
    assert FAMILIES[name].kind != "histogram", f"{name} is a histogram, which has no series of that name"
    return {"node", *FAMILIES[name].labels} | OF_PROMETHEUS


def check(expression: str) -> set[str]:
    """Hold an expression against the metrics, and return the labels by which it groups."""
    known: set[str] = set()
    selectors = list(SELECTOR.finditer(expression))
    assert selectors, f"no metric of ours in {expression}"
    for selector in selectors:
        labels = labels_of(selector["name"])
        known |= labels
        matchers = list(MATCHER.finditer(selector["matchers"] or ""))
        assert len(matchers) == (selector["matchers"] or "").count("="), f"a matcher is not understood: {selector[0]}"
        assert {matcher["label"] for matcher in matchers} <= labels, selector[0]
    grouped = {label for group in GROUPED.finditer(expression) for label in re.findall(r"\w+", group["labels"])}
    assert grouped <= known, f"{grouped - known} in {expression}"
    counters = re.findall(rf"(?:rate|increase)\({PREFIX}(\w+)", expression)
    for name in counters:
        assert name.endswith(("_bucket", "_sum", "_count")) or FAMILIES[name].kind == "counter", f"{name} does not rise"
    return grouped


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels(of: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [panel for panel in (of or json.loads(DASHBOARD.read_text()))["panels"] if panel["type"] != "row"]


def test_each_alert_is_there() -> None:
    assert [rule["alert"].removeprefix("Mailroom") for rule in rules()] == list(ALERTS)


def test_alerts_name_metrics_that_exist_and_a_command_to_run_and_a_panel_shows_them() -> None:
    headings = tuple(re.findall(r"^## (mailroom .*)$", CLI_PAGE.read_text(), re.M))
    for rule in rules():
        alert, known = rule["alert"], check(rule["expr"])
        summary, action = rule["annotations"]["summary"], rule["annotations"]["action"]
        assert set(re.findall(r"\$labels\.(\w+)", summary + action)) <= known, alert
        assert rule["labels"]["severity"] in ("page", "ticket"), alert
        commands = re.findall(r"\bmailroom(?: [a-z-]+)+", action)
        assert commands, f"{alert} says what to run"
        assert [command for command in commands if not command.startswith(headings)] == [], alert
        assert named(rule["expr"]) <= named(DASHBOARD.read_text()), alert


def test_bound_of_the_error_budget_is_a_bound_of_the_histogram() -> None:
    process = import_module("mailroom.metrics.process")
    [budget] = [rule for rule in rules() if rule["alert"] == "MailroomErrorBudget"]
    assert {float(bound) for bound in re.findall(r'le="([^"]*)"', budget["expr"])} <= set(process.BOUNDS[process.AGE])


def check_panels(found: list[dict[str, Any]]) -> None:
    for panel in found:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= check(target["expr"]), panel["title"]


def test_each_metric_is_on_a_panel_which_asks_for_metrics_that_exist() -> None:
    """`python -m tests.metrics_page` makes those of new metrics."""
    kept = json.loads(DASHBOARD.read_text())
    assert dashboard(kept) == kept
    check_panels(panels())
    check_places(kept)
    few = dashboard({**kept, "panels": [kept["panels"][0], kept["panels"][-1]]})
    check_panels(panels(few))
    shown = named(" ".join(target["expr"] for panel in panels(few) for target in panel["targets"]))
    assert shown == {PREFIX + name for name in FAMILIES}
    check_places(few)


def test_variables_of_the_dashboard_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for panel in panels() for target in panel["targets"])))
    assert used - {"__rate_interval"} | {"datasource"} == set(variables)
    for name in ("node", "inbox"):
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", variables[name]["definition"])
        assert match is not None
        check(match[1])
        assert match[2] == name


def check_places(of: dict[str, Any]) -> None:
    fields = [
        (x, y)
        for panel in of["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(fields) == len(set(fields))
    assert max(x for x, _ in fields) < 24


def test_expression_that_names_what_does_not_exist_is_found_out() -> None:
    for expression in (
        "mailroom_no_such_metric",
        'mailroom_clock{inbox="a"}',
        "sum by (inbox) (mailroom_clock)",
        "rate(mailroom_clock[5m])",
        "mailroom_clock_bucket",
        "up",
    ):
        with pytest.raises(AssertionError):
            check(expression)


@pytest.mark.slow  # so that it runs where `make promtool` has been
@pytest.mark.parametrize("arguments", [["check", "rules", RULES.name], ["test", "rules", "mailroom.test.yml"]])
def test_promtool_passes(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus, or make promtool")
    done = subprocess.run([promtool, *arguments], cwd=FILES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
