"""Goldens: runs held to text files beside their tests. Ranks use `golden`, the controller `summary`."""
