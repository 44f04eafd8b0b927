"""Logs: what is sent to one is written once, kept for a time, and read by many inboxes."""
