"""The transactions of the user's that a worker works in, and the sessions beside them."""
