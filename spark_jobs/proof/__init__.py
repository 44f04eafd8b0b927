"""What the audit reads, and what it checks."""
