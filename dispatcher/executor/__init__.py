"""The executor: applies executables, each exactly once."""
