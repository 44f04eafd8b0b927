"""Tests of the consumer's side."""
