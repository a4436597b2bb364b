"""Open resources that tests leave in their ranks."""
