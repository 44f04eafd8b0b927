"""What is supported, as tests and the check of a release read it."""

# The minor versions of Python that a release is tried on. docs/reference/versions.md and the classifiers name them.
MINORS = ("3.11", "3.12", "3.13", "3.14")
