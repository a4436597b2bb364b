"""Adoption of tests that start processes of their own: from the server of the ranks."""
