"""What `mailroom bench` measures: each measurement in a file of its own, beside the floor of the same machine.

Installed, this package is `mailroom._benchmarks`, so its modules import each other by relative names.
"""
