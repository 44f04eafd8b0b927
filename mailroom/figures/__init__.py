"""How a node stands: each figure is asked for here, once, by a statement whose rows have names.

Status, metrics, `mailroom top`, the doctor, traces and the dashboard say in their own way what these statements tell.
"""
