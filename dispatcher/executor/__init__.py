"""The executor: what is carried out where it is met, exactly once."""
