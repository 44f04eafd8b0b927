"""Who reads whom: what both nodes of a link tell and check before a message crosses."""
