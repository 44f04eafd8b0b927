"""The wheel as its users get it: built from the source distribution, installed into environments of its own.

Run by `make test-wheel`, apart from the other tests: it asks the package index for everything that is installed.
"""
