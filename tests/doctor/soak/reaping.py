"""The workers of the soak, for `mailroom worker run`: their handlers hang and fail where a message says so."""

import time
from typing import Any

import mailroom
from inbox import Message, Worker
from tests.doctor.soak.modes import FAIL, HANG, is_on


class Poisoned(Exception):
    """A message that no attempt gets through."""


def handle(message: Message, connection: Any) -> None:
    """Note the message; do what it says as long as that mode is on."""
    if message.value == FAIL and is_on(FAIL):
        raise Poisoned
    while message.value == HANG and is_on(HANG):
        time.sleep(0.05)
    connection.execute("INSERT INTO done (key) VALUES (%s)", [message.key])


def made(inbox: str, schema: str = "mailroom") -> Worker:
    """Return the worker of an inbox."""
    return Worker(mailroom.dsn(), inbox, handle, schema=schema, handle_signals=True)


orders = made("orders")
reports = made("reports")
copies = made("copies", "branch")
