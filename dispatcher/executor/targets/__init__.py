"""Which tables and functions executables may reach, and what they are."""
