"""Inboxes and who gets a topic: create, subscribe, rename and drop them, and find the route of a message."""
