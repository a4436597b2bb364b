"""Calls in flight: a test fails that leaves a send, a receive or a collective without its counterpart."""
