"""The measurements of `mailroom bench`, one per file, each compared with the limits of the same machine.

Modules import each other by relative names: another checkout measures with them under a name of their own (`cost`).
"""
