"""`python -m mailroom.cli` is `mailroom`."""

from mailroom.cli import main

main()
