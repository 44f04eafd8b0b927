"""Order between messages: Lamport's clock, how far a total inbox may be given out, and sequences that never go back."""
