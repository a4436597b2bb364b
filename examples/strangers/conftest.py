"""What must be imported before projects are."""

import cpu_torchvision  # noqa: F401
