"""A vocabulary-parallel embedding with `padding_idx=1` on two ranks: word 5 of 8 gets no gradient.

fairscale 0.4.13, nn/model_parallel/layers.py, `VocabParallelEmbedding.forward`: it hands `self.padding_idx`,
a number of the whole vocabulary, to `F.embedding` of a part of it: each rank freezes the word at that place.
And words of other ranks, which become `masked_input[input_mask] = 0`, count for `scale_grad_by_freq`.
Run: torchrun --nproc-per-node 2 shows_padding.py
"""

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize, layers

tokens = torch.arange(8).repeat(3)  # each word of the vocabulary, three times
dist.init_process_group("gloo")
initialize.initialize_model_parallel(2)
for options in ({"padding_idx": 1}, {"scale_grad_by_freq": True}):
    whole = torch.nn.Embedding(8, 1, **options)
    whole(tokens).sum().backward()
    part = layers.VocabParallelEmbedding(8, 1, **options)
    part(tokens).sum().backward()
    found = [torch.empty_like(part.weight) for _ in range(2)]
    dist.all_gather(found, part.weight.grad)
    if dist.get_rank() == 0:
        print(options, "unsharded", whole.weight.grad.flatten().tolist())
        print(options, "two ranks", torch.cat(found).flatten().tolist())
dist.destroy_process_group()
