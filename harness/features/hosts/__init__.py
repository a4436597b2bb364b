"""Worlds across hosts: the meeting of hosts, the agent on each, and the launcher that uses them."""
