"""How a folded batch is applied: rows, conditions, ranges, and code of the user's."""
