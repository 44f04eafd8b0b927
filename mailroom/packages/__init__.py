"""What is installed here, and what is imported only when it is asked for."""
