"""Launchers: how the ranks of a world come to life."""
