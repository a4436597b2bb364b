"""Fake worlds: one process runs a test as a rank of a world of any size, under torch's backend `fake`."""
