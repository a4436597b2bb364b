"""Worlds across hosts: the rendezvous of hosts, the agent on each, and the launcher that uses them."""
