"""Fuzzing with atheris, which is no part of the development environment: `pip install -e '.[fuzz]'`."""
