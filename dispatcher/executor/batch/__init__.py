"""A batch of executables: what is taken, what it folds to, and what it leaves in its place."""
