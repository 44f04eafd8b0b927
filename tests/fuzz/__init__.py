"""Fuzzing with atheris, which is not part of the development environment: `pip install -e '.[fuzz]'`."""
