"""The message: its columns, what a writer gives, what a reader gets, and the values and headers it carries."""
