"""Stages: what runs before a test, on a world of another size, and leaves files for it."""
