from typing import ClassVar

from django.db import migrations

from mailroom.django.operations import CreateInbox


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    dependencies: ClassVar = [("mailroom", "0001_initial")]
    operations: ClassVar = [CreateInbox("shipping", subscribe=["order.paid"], max_attempts=3)]
