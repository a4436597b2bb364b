"""Does what `import torch` would: for processes that are forks of one which has imported torch before."""

import pretended

pretended.register()
