"""Where a drain puts messages: its lanes, its folder and its files."""
