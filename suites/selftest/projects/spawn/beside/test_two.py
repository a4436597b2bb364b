"""The same port as in the other file."""

from test_one import test_port as test_port
