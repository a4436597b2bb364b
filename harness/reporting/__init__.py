"""Merging of the reports of N ranks into one: the cause first, then its victims, then the re-run line."""
