"""Tests of statements, transactions, and the SQL interface."""
