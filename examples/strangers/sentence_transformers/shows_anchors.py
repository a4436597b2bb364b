"""GISTEmbedLoss contrasts anchors, which is its default, with those of its own rank alone, though it gathers.

sentence-transformers 6.2.0, `sentence_transformer/losses/gist_embed.py` (and `cached_gist_embed.py`):
`aa_sim = self.sim_matrix(anchor, anchor)`, where `anchor` is not gathered as `positive` and `negative`
are. The documentation says "gather the embeddings across all devices before computing the loss".
Run: torchrun --nproc-per-node 2 shows_anchors.py
"""

import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast


class Encoder(nn.Identity):
    """The embeddings are given."""

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"word": 0})))
    max_seq_length = 8

    def forward(self, features):
        return {"sentence_embedding": features["input_ids"]}


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
columns = torch.randn(2, 8, 6)  # anchors and positives; rank 0 has the first four rows of each
mine = columns[:, 4 * rank : 4 * rank + 4]
for anchors in (False, True):
    options = {"temperature": 0.1, "contrast_anchors": anchors}
    whole = GISTEmbedLoss(Encoder(), Encoder(), **options)
    gathered = GISTEmbedLoss(Encoder(), Encoder(), gather_across_devices=True, **options)
    expected = whole([{"input_ids": each} for each in columns], None)
    found = gathered([{"input_ids": each} for each in mine], None)
    dist.all_reduce(found)
    if rank == 0:
        print(f"contrast_anchors={anchors}: of 8 rows {expected:.6f}, mean of two ranks {found / 2:.6f}")
dist.destroy_process_group()
