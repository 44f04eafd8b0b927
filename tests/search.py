"""The site's search shows guides first: `python -m tests.search` puts the index that zensical has built in order.

Its search ranks an item by the field that matches (title, path, text), then by the place of the word in it, then by the
order of the items. So guides stand before the reference, an attribute is part of its class, and what only has a name
says first what it is: "class inbox.Retry" does not hide the heading "Retry".
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.pages import ROOT

Item = dict[str, Any]

SITE = ROOT / "site"
INDEX = "search.json"
FOLDERS = ("index.html", "start", "guides", "operate", "understand", "reference", "decisions", "errors")
WORKER = "assets/javascripts/workers/search*.js"
ASK = ROOT / "tests" / "support" / "search.js"
FIRST = 3  # so many results are looked at before another word is tried
KIND = re.compile(r"\s*<small><code>([\w-]+)</code></small>")
OF_A_CLASS = {"instance-attribute", "class-attribute", "property", "cached"}
# What people type, and the page that should be among the first results.
QUERIES = {
    "ordering": "time-and-order",
    "monitoring": "alerts",
    "retry": "consuming",
    "schedule": "periodic",
    "cron": "periodic",
    "delay": "sending",
    "exactly once": "guarantees",
    "idempotency": "idempotent-effects",
    "health check": "deploying",
    "dlq": "parked-keys",
    "backoff": "consuming",
    "dead letter": "parked-keys",
    "poison message": "parked-keys",
    "rate limit": "limits",
    "circuit breaker": "limits",
    "pause": "parked-keys",
    "replay": "archive",
    "batch": "consuming",
    "timeout": "slow-handlers",
    "kubernetes": "deploying",
    "docker": "docker",
    "pgbouncer": "pgbouncer",
    "permissions": "roles",
    "backup": "restores",
    "upgrade": "upgrading",
    "lag": "alerts",
    "dashboard": "dashboard",
    "opentelemetry": "traces",
    "logging": "events",
    "deduplication": "idempotent-effects",
    "cdc": "watch",
    "request reply": "requests",
    "kafka": "kafka",
    "throughput": "tuning",
    "latency": "tuning",
    "migration": "migrations",
    "async": "sending",
    "cancel": "sending",
    "expire": "sending",
    "priority": "coming-from",
    "sharding": "scale",
    # Nothing that has a name got lost.
    "Outbox.cancel": "api-outbox",
    "max_attempts": "api-inbox",
    "dispatcher_lag_s": "api-mailroom",
    "MR-invalid-cron": "errors-inboxes",
}


def weighed(items: list[Item], words: dict[str, str]) -> list[Item]:
    """Return the items in order, attributes within their classes, with the words by which people look for a page."""
    found: list[Item] = []
    within: Item | None = None
    for item in items:
        kinds = KIND.findall(item["title"])
        name = KIND.sub("", item["title"])
        page, _, anchor = item["location"].partition("#")
        if within and OF_A_CLASS.intersection(kinds) and item["location"].startswith(f"{within['location']}."):
            within["text"] += f" <p><code>{name}</code></p> {item['text']}"
            continue
        item = {**item, "title": _title(page, anchor, name, kinds, item["level"])}
        if not anchor and page in words:
            item["title"] += f" ({words[page]})"
        if item["level"] <= 3:
            within = item
        found.append(item)
    return sorted(found, key=lambda item: FOLDERS.index(item["location"].split("#")[0].split("/")[0]))


def _title(page: str, anchor: str, name: str, kinds: list[str], level: int) -> str:
    if page.startswith("errors/") and name.startswith("MR-"):
        return f"the error {name}"
    if not (page.startswith("reference/api-") and anchor):
        return name
    if level > 3:
        kind = "method"
    elif anchor.rpartition(".")[2][:1].isupper():
        kind = "class"
    else:
        kind = "function" if level == 3 else "module"
    return f"the {kind} {anchor}"


def words_of_pages() -> dict[str, str]:
    """Return the words of `mkdocs.yml` by which people look for pages that call it something else."""
    given: dict[str, str] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]["search_words"]
    return {page.removesuffix(".md") + ".html": words for page, words in given.items()}


def answers(index: Path, worker: Path, queries: list[str]) -> dict[str, list[str]]:
    """Ask the site's own search in Node.js, and return the addresses that it shows."""
    asked = subprocess.run(
        ["node", str(ASK), str(worker), str(index), *queries], capture_output=True, text=True, check=True, timeout=60
    )
    shown: dict[str, list[str]] = json.loads(asked.stdout)
    return shown


def unfound(site: Path, queries: dict[str, str] = QUERIES) -> Iterator[str]:
    """Say which queries do not show their page among the first results; nothing where there is no Node.js."""
    if not shutil.which("node"):
        return
    [worker] = site.glob(WORKER)
    for query, shown in answers(site / INDEX, worker, list(queries)).items():
        pages = [Path(address.partition("#")[0]).stem for address in shown[:FIRST]]
        if queries[query] not in pages:
            yield f"the search for {query!r} shows {shown[:FIRST]}, and not {queries[query]}"


if __name__ == "__main__":
    path = SITE / INDEX
    built = json.loads(path.read_text())
    path.write_text(json.dumps({**built, "items": weighed(built["items"], words_of_pages())}))
