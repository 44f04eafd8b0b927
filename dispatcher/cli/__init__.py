"""The commands `mailroom dispatcher` and `mailroom executor`."""
