"""Sessions that take named steps in every order."""
