"""Rules of Mailroom as pure functions. SQL decides the same, or code that reads and writes; tests compare the two."""
