"""Tests of sessions, commits, and servers in trouble."""
