"""Names that wrapping puts into a model, and names without them. Imports nothing."""

INNER = "_sharded_module"
"""Where a wrapper holds the module that it wraps."""
FLAT = "flat_param"
"""What a wrapper calls the flat parameter of its group, and a local state dict this rank's shard."""


def clean_name(name: str) -> str:
    """Return ``name`` as it is in the unsharded model."""
    return ".".join(part for part in name.split(".") if part != INNER)


def joined(prefix: str, name: str) -> str:
    """Return ``name`` below the module that is called ``prefix``, ``""`` for the model itself."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
