"""Workers: services that reap an inbox, one transaction per batch."""
