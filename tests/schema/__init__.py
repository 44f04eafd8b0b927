"""Tests of a node's schema and its migrations."""
