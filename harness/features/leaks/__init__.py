"""Open resources, and freed memory, that tests leave in their ranks."""
