"""A batch in the hands of the user's handlers."""
