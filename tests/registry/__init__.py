"""Tests of inboxes and their subscriptions."""
