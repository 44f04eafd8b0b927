"""What a leader does beside delivering: floors, leftovers, and rows that nobody needs any more."""
