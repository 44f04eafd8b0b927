"""Requests: send a command and wait for its answer."""
