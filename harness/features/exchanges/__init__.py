"""Sends and receives: a test fails that leaves one which no other rank has taken up."""
