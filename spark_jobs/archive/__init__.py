"""Where a drain puts messages: its shards, its folder and its files."""
