"""Inboxes as DataFrames and as streams."""
