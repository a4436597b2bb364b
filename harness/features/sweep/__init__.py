"""Sweeps: a fault at every collective and every operation on a file of a save, on every rank."""
