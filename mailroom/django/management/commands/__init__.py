"""`manage.py mailroom`."""
