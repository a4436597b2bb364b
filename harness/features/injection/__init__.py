"""Disturbances of collectives: delays drawn from a seed, poisoned outputs, faults. Runs on ranks."""
