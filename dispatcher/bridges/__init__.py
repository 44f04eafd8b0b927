"""Bridges: what is stamped for a broker is published there, and what a broker has is taken in."""
