"""A Django project with the app `mailroom.django`, and an app of a user's, on a database that has no schema yet."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from tests.support.django import connected

APPS = ["mailroom.django", "tests.django.shop"]


@pytest.fixture
def project(empty_dsn: str) -> Iterator[Any]:
    """Give Django's connection of the project."""
    with override_settings(INSTALLED_APPS=APPS), connected(empty_dsn) as connection:
        yield connection
