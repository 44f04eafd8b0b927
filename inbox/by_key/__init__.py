"""An inbox ordered by key: claim, fail, park and look at its messages."""
