"""CPU binding: ranks that run on CPUs of their own, where the project asks for it."""
