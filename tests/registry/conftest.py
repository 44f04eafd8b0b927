"""How long dropping and renaming an inbox wait for others."""

from collections.abc import Callable

import pytest

from mailroom.registry import exclusive
from mailroom.sql.operation import Sql


@pytest.fixture
def waits_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what sets how long they wait for a lock: 3 s are long for a test, and short on a busy machine."""

    template = exclusive.EXCLUDE.template
    assert "'3s'" in template

    def set_to(timeout: str) -> None:
        monkeypatch.setattr(exclusive, "EXCLUDE", Sql(template.replace("'3s'", f"'{timeout}'")))

    return set_to
