"""What the lanes of bridges agree on: the form of a record at a broker, out and in. It knows no broker."""
