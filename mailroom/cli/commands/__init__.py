"""The sub-commands of `mailroom` that belong to no other package."""
