"""What follows from the declarations of metrics: `python -m tests.metrics_page` writes it.

Those are the tables of docs/reference/metrics.md, and for each metric that is on no panel of Grafana's dashboard a
panel, the last one there.
"""

import json
import pkgutil
import re
from importlib import import_module
from itertools import count
from typing import Any

import mailroom.metrics
from mailroom.metrics.family import PREFIX, Family
from tests.support.pages import FILES, page_named

PAGE = page_named("metrics.md")
DASHBOARD = FILES / "mailroom-dashboard.json"
TABLE = re.compile(r"(\| metric \|.*\n\|[-|]+\n)(?:\|.*\n)*")
# The modules of the first tables; what is declared elsewhere happens in each process, as what the last one tells.
TABLES = {"process": "process", "catalog": "catalog", "leader": "leader", "failing": "leader"}
AGGREGATED = {
    "gauge": "max by ({by}) ({name}{{{of}}})",
    "counter": "sum by ({by}) (rate({name}{{{of}}}[$__rate_interval]))",
    "histogram": "histogram_quantile(0.99, sum by ({by}, le) (rate({name}_bucket{{{of}}}[$__rate_interval])))",
}
UNITS = {"s": "s", "1": "percentunit", "": "short"}


def families() -> dict[str, tuple[str, Family]]:
    """Return all metrics there are by name, in the order of their declarations, each with its table on the page."""
    modules = [each.name for each in pkgutil.iter_modules(mailroom.metrics.__path__)]
    found: dict[str, tuple[str, Family]] = {}
    for module in (*TABLES, *sorted({*modules} - {*TABLES})):
        for value in vars(import_module(f"mailroom.metrics.{module}")).values():
            if isinstance(value, Family):
                found.setdefault(value.name, (TABLES.get(module, "process"), value))
    return found


FAMILIES = {name: family for name, (_, family) in families().items()}


def page() -> str:
    """Return the page with its tables of metrics: those that are declared, and no others."""
    tables = dict.fromkeys(TABLES.values(), "")
    for table, family in families().values():
        labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
        tables[table] += f"| `{family.name}` | {family.kind} | {labels} | {family.help} |\n"
    rows = iter(tables.values())
    return TABLE.sub(lambda found: found[1] + next(rows), PAGE.read_text(), count=len(tables))


def named(text: str) -> set[str]:
    """Return the metrics that expressions name, with their prefix."""
    return {re.sub("_(count|sum|bucket)$", "", name) for name in re.findall(rf"\b{PREFIX}\w+", text)}


def dashboard(found: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard with a panel more for each metric that it does not show."""
    panels = list(found["panels"])
    known = named(json.dumps([target["expr"] for each in panels for target in each.get("targets", ())]))
    for family in FAMILIES.values():
        if PREFIX + family.name not in known:
            panels.append(_panel(family, panels))
    return {**found, "panels": panels}


def _panel(family: Family, panels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a panel like the last one, which shows this metric, in the first place that is free below it."""
    like = panels[-1]
    taken = {(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels}
    of = like["gridPos"]
    places = ({**of, "x": x, "y": y} for y in count(of["y"], of["h"]) for x in range(0, 24, of["w"]))
    by = ("node", *family.labels)
    matchers = ", ".join(f'{each}=~"${each}"' for each in by if each in ("node", "inbox"))
    expression = AGGREGATED[family.kind].format(by=", ".join(by), name=PREFIX + family.name, of=matchers)
    return {
        **like,
        "id": max(each["id"] for each in panels) + 1,
        "title": family.name.replace("_", " ").capitalize(),
        "description": family.help,
        "gridPos": next(each for each in places if (each["x"], each["y"]) not in taken),
        "fieldConfig": {"defaults": {"unit": UNITS[family.unit]}, "overrides": []},
        "targets": [
            {**like["targets"][0], "expr": expression, "legendFormat": " ".join(f"{{{{{each}}}}}" for each in by)}
        ],
    }


if __name__ == "__main__":
    PAGE.write_text(page())
    found = dashboard(json.loads(DASHBOARD.read_text()))
    DASHBOARD.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
