from typing import ClassVar

from django.db import migrations

from mailroom.django.operations import Subscribe


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    atomic = False  # as one that builds an index CONCURRENTLY
    dependencies: ClassVar = [("shop", "0001_initial")]
    operations: ClassVar = [Subscribe("shipping", "order.refunded")]
