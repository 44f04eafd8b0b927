"""Metrics of a node and of a process: what they are, where each comes from, and the ways out."""
