"""The commands `mailroom inbox`, `mailroom worker` and `mailroom parked`."""
