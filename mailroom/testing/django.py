"""For tests of Django that commit: Django's flush knows no table of Mailroom, so their messages would stay."""

from typing import Any

from django.db import transaction

from mailroom.django.place import place
from mailroom.testing.emptying import empty

__all__ = ["EmptiesNode", "empty_node"]


def empty_node() -> None:
    """Do what `empty` does, with the node of the setting `MAILROOM`, in a transaction of its own."""
    node = place()
    with transaction.atomic(using=node.database):
        empty(node.connection, schema=node.schema)


class EmptiesNode:
    """For a `TransactionTestCase` or `LiveServerTestCase`, named before it: the node is empty after each test.

    It is emptied after `tearDown` and all other clean-ups, in which what a test has started is to be stopped.
    """

    def run(self, result: Any = None) -> Any:
        """Run the test, as unittest does."""
        self.addCleanup(empty_node)  # type: ignore[attr-defined]  # of unittest
        return super().run(result)  # type: ignore[misc]
