"""An app of a user's, whose migrations make an inbox."""
