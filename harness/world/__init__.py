"""Worlds as a controller sees them: their ranks, one item run on them, what came of it and what was wrong."""
