"""The user's transactions that a worker works in, and the sessions beside them."""
