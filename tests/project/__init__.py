"""Tests of what holds docs, names, benchmarks and tests together."""
