"""Sessions that Mailroom opens itself: how they connect, listen and are given up."""
