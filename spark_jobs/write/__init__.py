"""DataFrames and streams on their way into the outbox, exactly once."""
