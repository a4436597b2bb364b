"""Progress of a test on ranks, shown while it runs. Runs in the controller; must not import torch."""
