"""Who reads whom: what both nodes of a link say and check before a message crosses."""
