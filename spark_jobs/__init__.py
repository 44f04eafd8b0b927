"""Spark writers and readers: exactly once into the outbox, and out of the inbox."""
