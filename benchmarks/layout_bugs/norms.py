"""Known bugs: total norms of gradients that are right."""

from bug import Bug
from places import NORM, ROOT

LARGEST = "dist.all_reduce(total, dist.ReduceOp.MAX)\n        return total.sqrt()"
ALONE = NORM.replace(", self.shards.axes(name)", ", []")

BUGS = [
    Bug(
        "the norm is that of this rank's parts",
        "",
        [("by_hand", NORM, ALONE)],
        names=r"^total norm lacks a sum over tp \(",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "the norm leaves out experts",
        "Megatron-LM#5916",
        [("by_hand", NORM, f"{NORM} * ('moe.w' not in name)")],
        names=r"^total norm leaves out what is cut over ep \(6 of 23\) \(",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "the norm counts experts of this rank alone",
        "transformers#48205",
        [("by_hand", NORM, NORM.replace("self.shards.axes(name)", "self.shards.axes(name) - {'ep'}"))],
        names=r"^total norm lacks a sum over ep \(",
        layouts="ep2 dp2-ep2 ep2-tp2",
    ),
    Bug(
        "the norm counts replicas over tp twice",
        "",
        [("by_hand", NORM, NORM.replace("self.shards.axes(name)", "['tp']"))],
        names=r"^total norm counts what is replicated over tp more than once \(",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "the norm is that of this stage",
        "torchtitan#596",
        [("pipeline", 'return self.sum_over(own, ("pp",)).sqrt()', "return own.sqrt()")],
        names=r"^total norm lacks a sum over pp \(",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "the norm counts tied embeddings on both stages",
        "",
        [("pipeline", "own -= self.model.head.weight.grad.square().sum()", "own -= 0")],
        names=r"^total norm counts (`embed.weight` 2 times|what is replicated over pp more than once) \(",
        plan="pipeline.Plan",
        model="tiny.build_tied",
        shards="pipeline.TIED",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "the norm leaves out the sink of attention",
        "Megatron-LM#7452",
        [("by_hand", NORM, f"{NORM} * ('sink' not in name)")],
        names=r"^total norm leaves out `attention.sink` \(",
        plan="rich.Plan",
        model="rich.build",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "the norm is the largest of those of ranks",
        "pytorch#180346",
        [("by_hand", NORM, ALONE), ("by_hand", ROOT, LARGEST)],
        names=r"^total norm is the largest of the norms along tp, not",
        layouts="tp2",
    ),
    Bug(
        "the norm is the sum of the norms of tensors",
        "",
        [("by_hand", NORM, f"{NORM}.sqrt()"), ("by_hand", ROOT, "return total")],
        names=r"^total norm is a sum of the norms of tensors, not",
        layouts="tp2",
    ),
]
