"""Mutants: each rule broken once in a copy of the source, and the test that must notice.

A file per package has them: the rule, the tests that stand for it, and the edits that break it, each a text to find and
one to put in its place. A mutant whose text is not found is renewed by making the same change to the code of today.
"""
