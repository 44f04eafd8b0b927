"""A web service with Django in one file: an order commits with its message, and messages are reaped with the ORM.

Create the inbox once, then run the service, and beside it a dispatcher and the consumer:

    mailroom inbox create shipping --subscribe order.paid
    python -m examples.django_shop runserver
    python -m examples.django_shop ship
"""

import os
import sys
import time

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

if not settings.configured:
    server = conninfo_to_dict(os.environ.get("MAILROOM_DSN", ""))
    names = {"HOST": "host", "PORT": "port", "NAME": "dbname", "USER": "user", "PASSWORD": "password"}
    settings.configure(
        ROOT_URLCONF=__name__,
        ALLOWED_HOSTS=["*"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                **{name: server[option] for name, option in names.items() if option in server},
            }
        },
    )
    django.setup()

from django.core.management import execute_from_command_line
from django.db import connection, models, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.http import require_POST

from inbox import Inbox, Message
from outbox import Outbox

outbox = Outbox()
shipping = Inbox("shipping")


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    """An order: `paid`, then `shipped`."""

    id = models.IntegerField(primary_key=True)
    state = models.TextField()

    class Meta:
        """Where it is, without an app of its own."""

        app_label = "shop"
        db_table = "shop_order"


@require_POST  # type: ignore[untyped-decorator]
@transaction.atomic  # type: ignore[untyped-decorator]
def pay(request: HttpRequest, order: int) -> JsonResponse:
    """Pay an order. The transaction ends with this function, before the response goes out."""
    Order.objects.create(id=order, state="paid")
    outbox.publish(connection, "order.paid", {"order": order}, key=order)
    return JsonResponse({"order": order}, status=201)


def ship(message: Message) -> None:
    """Ship the order of a message."""
    Order.objects.filter(id=message.value["order"]).update(state="shipped")


def ship_waiting() -> int:
    """Ship all that waits, each batch in one transaction with the reaping of its messages; return how many."""
    shipped = 0
    while True:
        with transaction.atomic():
            messages = shipping.reap_any(connection)
            for message in messages:
                ship(message)
        if not messages:
            return shipped
        shipped += len(messages)


urlpatterns = [path("orders/<int:order>/pay", pay)]


def main() -> None:
    """Run the consumer, or a command of Django."""
    if sys.argv[1:] != ["ship"]:
        execute_from_command_line(sys.argv)
        return
    while True:
        if not ship_waiting():
            time.sleep(1)


if __name__ == "__main__":
    main()
