"""Mutants: each rule broken once in a copy of the source, and the test that must notice.

`NN-name.patch` starts with a header, `Rule:` and one `Test:` line for each test that stands for the rule; the diff that
breaks the rule follows. A patch that no longer applies is renewed by making the same change to the code of today.
"""
