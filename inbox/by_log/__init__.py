"""An inbox that reads a log: claim by lanes, divert what fails into the inbox's own table, and go on there by key."""
