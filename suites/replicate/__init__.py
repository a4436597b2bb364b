"""Claims about what the two composable fronts, `fully_shard` and `replicate`, have in common."""
