"""The page of metrics names every metric that is answered, and none besides."""

import re

from tests.metrics.test_alerts import FAMILIES
from tests.support.pages import page_named

PAGE = page_named("metrics.md").read_text()


def test_rows_of_the_page_are_the_metrics() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(
        (family.name, family.kind, ", ".join(f"`{label}`" for label in family.labels) or "-", family.help)
        for family in FAMILIES.values()
    )
