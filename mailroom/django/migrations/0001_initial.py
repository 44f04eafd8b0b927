"""The schema of the first release."""

from typing import ClassVar

from django.db import migrations

from mailroom.django.operations import MailroomSchema


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """The schema of the first release."""

    initial = True
    operations: ClassVar = [MailroomSchema("0152")]
