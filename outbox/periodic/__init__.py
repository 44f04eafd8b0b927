"""Periodic messages: which there are, and when the next message of each is sent. The dispatcher sends them."""
