"""The coverage of ranks, where pytest-cov measures that of the controller."""
