"""What a leader does beside delivering: floors, leftovers, and rows that are no longer needed."""
