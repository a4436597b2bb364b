"""Claims about models that torch.compile compiles, whole or by unit, on the fronts of an engine."""
