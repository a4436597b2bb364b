"""Failures as annotations of a GitHub Actions run."""
