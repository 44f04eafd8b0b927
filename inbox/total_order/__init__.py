"""An inbox in total order: the same questions as by key, answered by statements of its own."""
