"""Tests of the examples and the demo."""
