"""Order between messages: what each order allows, Lamport's clock, how far a total inbox goes, and sequences."""
