"""Statements: what an operation is, how it runs on whatever connection there is, and what errors mean."""
