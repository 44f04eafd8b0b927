"""A node as a whole: who it is, how it stands, where a message is, and its dead letters."""
