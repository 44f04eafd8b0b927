"""Tests of the writer's side."""
