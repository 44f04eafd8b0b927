"""Tests of clocks and sequences."""
