"""Bridges: what they write to a broker, and what they make of its records."""
