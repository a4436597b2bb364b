"""Notes of ranks in pytest's XML report."""
