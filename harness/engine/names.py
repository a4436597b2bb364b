"""Names that wrapping puts into a model, and names without them. Imports torch only."""

from collections.abc import Iterator

from torch import nn

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


def registered_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of all modules as they are registered, under which `load_state_dict` looks for them."""
    yield prefix
    for name, child in module._modules.items():
        if child is not None:
            yield from registered_names(child, joined(prefix, name))
