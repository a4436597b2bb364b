"""CoCa's loss of captions is the mean of each rank's mean: words count by how much padding their rank has.

OpenCLIP 3.3.0, `loss.py`: `self.caption_loss(logits.permute(0, 2, 1), labels)` in `CoCaLoss.forward`, a
CrossEntropyLoss that divides by the words of this rank that are no padding; to DDP all ranks weigh the same.
Run: torchrun --nproc-per-node 2 shows_captions.py
"""

import torch
import torch.distributed as dist
from open_clip.loss import CoCaLoss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows, features = torch.randn(4, 3), torch.nn.functional.normalize(torch.randn(4, 6), dim=-1)
words = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 0, 0], [2, 0, 0]])  # 0 is padding


def gradient(model, part, loss):
    of_images = features[part]  # the same as of texts, without gradients: the loss of captions is what trains
    captions = model(rows[part]).unflatten(-1, (3, 7))
    found = loss(of_images, of_images, captions, words[part], torch.tensor(1.0))
    sum(found).backward()
    return [each.grad for each in model.parameters()][1][:5]


model = nn.Linear(3, 3 * 7)
whole = gradient(model, slice(None), CoCaLoss(caption_loss_weight=1.0, clip_loss_weight=1.0))
model.zero_grad()
half = slice(2 * rank, 2 * rank + 2)
options = {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": ranks}
loss = CoCaLoss(caption_loss_weight=1.0, clip_loss_weight=1.0, **options)
found = gradient(DistributedDataParallel(model), half, loss)
if rank == 0:
    print("gradients of all rows on one rank", whole.tolist())
    print("of two rows on each of two ranks ", found.tolist())
dist.destroy_process_group()
