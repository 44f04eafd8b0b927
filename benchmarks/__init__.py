"""What `mailroom bench` measures: each measurement in a file of its own, beside the floor of the same machine."""
