"""Sessions of our own: how they are opened, listen, and are given up."""
