"""Plain values: names, numbers, cron expressions, CBOR, and words for a shell. No part of it knows a database."""
