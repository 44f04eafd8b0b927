"""`manage.py mailroom ...`: the command `mailroom` in a Django project, on the database of the project's settings."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from mailroom.cli.root import root
from mailroom.django.checks import check_database
from mailroom.django.place import NodePlace, dsn, place
from mailroom.session.settings import DSN_VARIABLE
from mailroom.values.names import DEFAULT_SCHEMA


# D-schema-7: `manage.py mailroom` is the root of the command.
class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Hand everything to `mailroom`, after `django.setup()`: workers on Django's connection need no more."""

    help = "The command `mailroom`, on the database that the settings name: manage.py mailroom --help."
    requires_system_checks: Sequence[str] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take what `mailroom` takes, for `call_command`."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run `manage.py mailroom ARGUMENTS`. argparse would take options of `mailroom` for Django's."""
        # Django has obeyed these two by now.
        parser = CommandParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        _, arguments = parser.parse_known_args(argv[2:])
        sys.exit(self._ran(arguments))

    def handle(self, *_: object, arguments: Sequence[str], **__: Any) -> None:
        """Run it for `call_command`. Raises `CommandError` unless it ends with 0."""
        if code := self._ran(arguments):
            raise CommandError(f"mailroom {' '.join(arguments[:2])} ended with {code}", returncode=code)

    def _ran(self, arguments: Sequence[str]) -> int:
        """Run `mailroom`, which says itself what is wrong, and return its exit code."""
        wrong = check_database()
        if wrong:
            self.stderr.write(f"{wrong[0].msg} {wrong[0].hint}")
            return 2
        node = place()
        before = os.environ.get(DSN_VARIABLE)
        try:
            # Not as an argument: a password would be seen in it, in tracebacks and by who lists processes.
            os.environ[DSN_VARIABLE] = dsn(node)
        except ImproperlyConfigured as error:
            self.stderr.write(str(error))
            return 2
        try:
            root.main([*_schema(node, arguments), *arguments], prog_name="manage.py mailroom")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            if before is None:
                del os.environ[DSN_VARIABLE]
            else:
                os.environ[DSN_VARIABLE] = before


def _schema(node: NodePlace, arguments: Sequence[str]) -> list[str]:
    """Return the option that stands before all that is typed, which wins. Workers name their schema themselves."""
    return [] if node.schema == DEFAULT_SCHEMA or "worker" in arguments[:1] else ["--schema", node.schema]
