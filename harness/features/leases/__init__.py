"""Leases: worlds of all runs of a user share GPUs of a machine, and ranks where `ranks_at_once` is set."""
