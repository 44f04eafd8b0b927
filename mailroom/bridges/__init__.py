"""Bridges: other brokers as links."""
