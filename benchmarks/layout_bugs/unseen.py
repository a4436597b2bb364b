"""Bugs by someone who has not read the diagnoser: what people get wrong, whatever a report says of it."""

from bug import Bug

REDUCED = "        self.reduce_gradients()\n        return self.sum_over(total, (*ROWS, *SEQUENCE))"
TOTAL = "        total = torch.zeros((), dtype=torch.float64)\n        for each, wanted"
STAGE = "        if self.stage > 0:\n            model.embed = None\n"

BUGS = [
    Bug(
        "gradients of attention are averaged over cp, all others summed",
        "",
        [
            (
                "by_hand",
                REDUCED,
                REDUCED.replace(
                    "        return",
                    "        for name, each in self.model.named_parameters():\n"
                    "            each.grad /= self.layout['cp'] if '.attention.' in name else 1\n"
                    "        return",
                ),
            )
        ],
        names=r"(?=.*attention)(?=.*\bcp\b)(?=.*(mean|averag|divid|factor|times|multipl|scale|half|0\.5))",
        layouts="cp2 dp2-cp2",
    ),
    Bug(
        "gradients that accumulate are reduced after each microbatch",
        "",
        [
            (
                "by_hand",
                "            total += part.detach()\n        self.reduce_gradients()\n",
                "            total += part.detach()\n            self.reduce_gradients()\n",
            )
        ],
        names=r"(?=.*microbatch)(?=.*\b(sum|reduc))(?=.*\bdp\b)",
    ),
    Bug(
        "stages without a loss return before they reduce gradients",
        "",
        [
            (
                "pipeline",
                "        self.reduce_gradients()\n        if not is_last:\n            return None\n",
                "        if not is_last:\n            return None\n        self.reduce_gradients()\n",
            )
        ],
        names=r"(?=.*(embed|layers\.0|\bpp0?\b|stage))(?=.*(lack|without|miss|after).*(sum|reduc).*\b(dp|tp)\b)",
        plan="pipeline.Plan",
        layouts="dp2-pp2 pp2-tp2",
    ),
    Bug(
        "FSDP ignores a parameter, and no rank reduces its gradient",
        "",
        [
            (
                "with_fsdp2",
                "fully_shard(model, mesh=mesh)",
                "fully_shard(model, mesh=mesh, ignored_params={model.norm.weight})",
            )
        ],
        names=r"\bnorm\.weight.*(sum|mean|averag|reduc).*\bfsdp\b",
        plan="by_dtensor.Plan",
        layouts="fsdp2 fsdp2-tp2",
    ),
    Bug(
        "FSDP averages the auxiliary loss, which is not multiplied by the ranks",
        "",
        [
            (
                "with_fsdp2",
                "            part = share(self.model(each), wanted, batch)\n"
                "            (part * ranks).backward()\n",
                "            logits, penalty = self.model(each)\n"
                "            part, scaled = (\n"
                "                share((logits, penalty * by), wanted, batch) for by in (1, 1 / ranks)\n"
                "            )\n"
                "            (scaled * ranks).backward()\n",
            )
        ],
        names=r"(?=.*penalty)(?=.*(\bfsdp\b|\b[24]\b|0\.25|0\.5|half|quarter))",
        plan="with_fsdp2.Plan",
        layouts="fsdp2 dp2-fsdp2",
    ),
    Bug(
        "the auxiliary loss sends no gradient back through the pipeline",
        "",
        [
            (
                "model",
                "x.new_zeros(1) if penalty is None else penalty",
                "x.new_zeros(1) if penalty is None else penalty.detach() + 0 * penalty",
            )
        ],
        names=r"(?=.*penalty)(?=.*(lack|leave|left|without|miss|\bno\b))",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "labels are shifted in each part of the sequence, whose last token has none",
        "",
        [
            (
                "by_hand",
                TOTAL,
                "        if self.layout.at('cp') < self.layout['cp'] - 1:\n"
                "            pad = torch.nn.functional.pad\n"
                "            labels = [pad(each[:, :-1], (0, 1), value=-100) for each in labels]\n"
                f"{TOTAL}",
            )
        ],
        module=r"(head)?$",
        layouts="cp2 dp2-cp2",
    ),
    Bug(
        "cross entropy over the vocabulary's ranks counts tokens without a label",
        "",
        [
            (
                "vocab_parallel",
                "((log_sum - of_labels) * (labels >= 0)).sum()",
                "(log_sum - of_labels).sum()",
            )
        ],
        module=r"(head)?$",
        plan="vocab_parallel.Plan",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "the loss that a pipeline reports is the last microbatch's",
        "",
        [("pipeline", "torch.stack(losses).sum().detach()", "losses[-1].detach().clone()")],
        names=r"(?=.*\bloss\b)(?=.*microbatch)(?=.*(last|lack|leave|left|lost|only|without|one|first))",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "the loss that is reported has those of the steps before in it",
        "",
        [
            (
                "by_hand",
                REDUCED,
                REDUCED.replace("return ", "self.seen = getattr(self, 'seen', 0) + ")
                + "\n        return self.seen",
            )
        ],
        names=r"(?=.*\bloss\b)(?=.*\b(before|previous|earlier|accumulat\w*|steps)\b)",
    ),
    Bug(
        "the norm adds norms of stages, not their squares",
        "",
        [
            (
                "pipeline",
                'return self.sum_over(own, ("pp",)).sqrt()',
                'return self.sum_over(own.sqrt(), ("pp",))',
            )
        ],
        names=r"(?=.*norm)(?=.*\bpp\b)(?=.*(root|square|norms))",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "the norm is taken before gradients are reduced",
        "",
        [
            (
                "by_hand",
                REDUCED,
                f"        self.norm = None\n        self.norm = self.grad_norm()\n{REDUCED}",
            ),
            (
                "by_hand",
                "def grad_norm(self):\n",
                "def grad_norm(self):\n        if self.norm is not None:\n            return self.norm\n",
            ),
        ],
        names=r"(?=.*norm)(?=.*(before|unreduced|not (yet )?(summed|reduced)))(?=.*(sum|reduc))(?=.*\bdp\b)",
    ),
    Bug(
        "positions are of a sequence balanced over cp, tokens of one in order",
        "",
        [
            (
                "by_hand",
                '        return torch.arange(length) + self.layout.at("cp") * length\n',
                '        half, rank, ranks = length // 2, self.layout.at("cp"), self.layout["cp"]\n'
                "        parts = rank, 2 * ranks - 1 - rank\n"
                "        return torch.cat([torch.arange(half) + part * half for part in parts])\n",
            )
        ],
        module=r"layers\.0\.attention(\.|$)",
        layouts="cp2 dp2-cp2",
    ),
    Bug(
        "keys and values of other ranks send no gradient back",
        "",
        [
            (
                "by_hand",
                '            k, v = (Gather.apply(each, 2, self.layout.group("cp")) for each in (k, v))\n',
                '            group, length, kv = self.layout.group("cp"), q.shape[2], (k, v)\n'
                "            whole = [all_gather(each.detach(), 2, group).split(length, 2) for each in kv]\n"
                "            whole = [list(parts) for parts in whole]\n"
                "            for parts, own in zip(whole, kv, strict=True):\n"
                "                parts[group.rank()] = own\n"
                "            k, v = (torch.cat(parts, 2) for parts in whole)\n",
            )
        ],
        module=r"layers\.1\.attention(_norm|\.w[kv])$",
        layouts="cp2 dp2-cp2",
    ),
    Bug(
        "experts are loaded round robin, and called in blocks",
        "",
        [
            (
                "by_hand",
                "            each.data = self.shards.cut",
                "            if 'moe.w' in name:\n"
                "                ranks = layout['ep']\n"
                "                each.data = torch.cat([each.data[rank::ranks] for rank in range(ranks)])\n"
                "            each.data = self.shards.cut",
            )
        ],
        names=r"^(?!.*gradient)(?=.*moe\.w[123])(?=.*(order|\brows|\bparts?\b|\branks?\b|other))",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "a stage loads its layers by their numbers in the stage",
        "",
        [
            (
                "pipeline",
                "        for number in range(len(model.layers)):\n",
                "        for number in range(each):\n"
                "            mine = model.layers[str(number + self.stage * each)]\n"
                "            mine.load_state_dict(model.layers[str(number)].state_dict())\n"
                "        for number in range(len(model.layers)):\n",
            )
        ],
        names=r"^(?!.*gradient)(?=.*layers\.1\.)(?=.*(layers\.0|other|initial|\bstart|\bvalues?\b))",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "the last stage's copy of tied embeddings has other values at the start",
        "",
        [
            (
                "pipeline",
                STAGE,
                f"{STAGE}            seeded = torch.Generator().manual_seed(1)\n"
                "            model.head.weight.data.normal_(generator=seeded)\n",
            )
        ],
        names=r"^(?!.*gradient)(?=.*(embed|head)\.weight)(?=.*(\bpp\b|stage|replica|copy|copies|tied))",
        plan="pipeline.Plan",
        model="tiny.build_tied",
        shards="pipeline.TIED",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "one rank of dp never gets the steps of a parameter",
        "",
        [
            (
                "by_hand",
                TOTAL,
                "        weight = self.model.norm.weight.data\n"
                "        if not hasattr(self, 'stale'):\n"
                "            self.stale = weight.clone()\n"
                "        if self.layout.at('dp') == 1:\n"
                "            weight.copy_(self.stale)\n"
                f"{TOTAL}",
            )
        ],
        names=r"^(?!.*gradient)(?=.*\bnorm\.weight)(?=.*(\bdp1?\b|replica|rank))",
    ),
    Bug(
        "tokens come back from experts by the permutation, not by its inverse",
        "",
        [("by_hand", "done[order.argsort()]", "done[order]")],
        module=r"layers\.0\.moe$",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "stages send float32 to each other",
        "",
        [("model", "if self.embed else x\n", "if self.embed else x.float().to(x.dtype)\n")],
        names=r"float32|single precision|round",
        module=r"layers\.1\.",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
]
