"""Layouts: items of a test for each layout of a plan, the smallest first."""
