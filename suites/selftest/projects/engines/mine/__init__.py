"""A package of engines."""
