"""Values of a type: what a typed topic sends and gives to its readers."""
