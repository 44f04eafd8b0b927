"""Coordinators as PuzzleDB has them: nodes of a cluster that tell each other what happened, and share their states.

A node has an inbox of its own. What a node posts reaches all others in one order, and a node's observers are called in
that order, in the transaction that takes the message. `python -m examples.coordinator` runs a cluster.
"""
