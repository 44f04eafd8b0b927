"""The app, as Django finds it."""

from django.apps import AppConfig
from django.core import checks

from mailroom.django.checks import check_database, check_node


class MailroomConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The app `mailroom`: migrations of others depend on it by this label."""

    name = "mailroom.django"
    label = "mailroom"
    verbose_name = "Mailroom"

    def ready(self) -> None:
        """Register the checks: one of the settings, and one that Django runs where it may ask the database."""
        checks.register(check_database)
        checks.register(check_node, checks.Tags.database)
