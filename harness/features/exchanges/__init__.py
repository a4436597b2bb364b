"""Sends and receives without their counterpart: ranks that wait for one, and what a test leaves in flight."""
