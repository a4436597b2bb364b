"""Disturbances of collectives: delays drawn from a seed, poisoned outputs, faults. Runs on ranks.

`schedule` alone imports no torch: the controller reads `--skew` by it.
"""
