"""The measurements of `mailroom bench`, one per file, each compared with the limits of the same machine.

Installed, this package is `mailroom._benchmarks`, so its modules import each other by relative names.
"""
