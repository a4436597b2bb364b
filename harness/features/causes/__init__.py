"""The causes of a run's failures, at the end of its report."""
