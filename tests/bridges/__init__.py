"""Tests of bridges."""
