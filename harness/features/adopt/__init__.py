"""Test classes of other projects, run unchanged on ranks."""
