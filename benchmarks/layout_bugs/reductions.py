"""Known bugs: reductions that are missing, doubled, or over other axes; factors. bug.py has the format."""

from bug import Bug
from places import REDUCE, SUM, after_sum, of_part, summed

MISSING = "(*ROWS, *SEQUENCE) if axis not in cut and not "
TIED = {"plan": "pipeline.Plan", "model": "tiny.build_tied", "shards": "pipeline.TIED"}
FREEZE = """    def grad_norm(self):
        for each in self.model.parameters():
            of = each.grad
            if isinstance(of, DTensor) and any(one.is_partial() for one in of.placements):
                whole = [WHOLE if one.is_partial() else one for one in of.placements]
                each.grad = DTensor.from_local(of.to_local(), of.device_mesh, whole)
"""
OPTIMIZER = """    def step(self):
        if not hasattr(self, "optimizer"):
            named = self.model.named_parameters()
            some = [each for name, each in named if name != "norm.weight"]
            self.optimizer = torch.optim.SGD(some, 0.01, 0.9)
        self.optimizer.step()
        self.model.zero_grad()

    def grad_norm(self):
"""

BUGS = [
    Bug(
        "gradients lack the sum over dp",
        "verl#2857",
        summed("('ep', *SEQUENCE) if axis not in cut"),
        names=r"^gradient of .* after a sum over dp: that",
        layouts="dp2 dp2-tp2 dp3-cp2",
    ),
    Bug(
        "gradients lack the sum over cp",
        "Megatron-LM#673",
        summed("(*ROWS, 'tp') if axis not in cut"),
        names=r"^gradient of .* after a sum over cp: that",
        layouts="cp2 dp2-cp2",
    ),
    Bug(
        "gradients of norms lack the sum over tp",
        "gpt-neox#1257, TransformerEngine#435",
        summed(f"{MISSING}('norm' in name and axis == 'tp')"),
        names=r"^gradient of `.*norm.weight` .* after a sum over tp: that",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "gradients of norms are averaged over tp, where they are to be summed",
        "",
        after_sum("each.grad /= self.layout['tp'] if 'norm' in name else 1"),
        names=r"^gradient of `.*norm.weight` .* 1/2 of the reference: divided by (tp|dp, or tp) \(2\)",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "gradients of norms are summed over dp twice, and not over cp",
        "transformers#48205",
        [
            (
                "by_hand",
                SUM,
                SUM.replace("not in cut", "not in cut and not ('norm' in name and axis == 'cp')")
                + "            self.sum_over(each.grad, ['dp'] if 'norm' in name else [])\n",
            )
        ],
        names=r"^gradient of `.*norm.weight` .* is wrong twice: after a sum over cp, which is missing",
        layouts="cp2-dp3",
    ),
    Bug(
        "gradient of the router lacks the sum over tp",
        "torchtitan#2387",
        summed(f"{MISSING}('router' in name and axis == 'tp')"),
        names=r"^gradient of `.*router.weight` .* after a sum over tp: that",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "gradient of the router is summed over tp twice",
        "torchtitan#2416",
        after_sum("self.sum_over(each.grad, ['tp'] if 'router' in name else [])"),
        names=r"^gradient of `.*router.weight` .* is 2 times the reference: multiplied by tp \(2\)",
        layouts="tp2 dp3-tp2",
    ),
    Bug(
        "gradients are summed over dp twice",
        "transformers#39648",
        after_sum("self.sum_over(each.grad, ['dp'])"),
        names=r"^gradient of .* is [23] times the reference: multiplied by (dp|dp, or cp) \([23]\)",
        layouts="dp2 dp3-cp2",
    ),
    Bug(
        "gradients of experts are summed over ep, which cuts them",
        "Megatron-LM#1628",
        after_sum("self.sum_over(each.grad, ['ep'] if 'moe.w' in name else [])"),
        names=r"^gradient of `.*moe.w\d` .* is the sum of the parts of all ranks of ep: ",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "gradients of experts are summed over tp, not over dp",
        "Megatron-LM#1628",
        [("by_hand", SUM, SUM.replace("axis for", "'tp' if 'moe.w' in name and axis == 'dp' else axis for"))],
        names=r"^gradient of `.*moe.w\d` .* is summed over tp, which cuts it, in place of dp$",
        layouts="dp2-tp2",
    ),
    Bug(
        "gradients of experts lack the sum over dp",
        "transformers#48205",
        summed(f"{MISSING}('moe.w' in name and axis == 'dp')"),
        names=r"^gradient of `.*moe.w\d` .* after a sum over dp: that",
        layouts="dp2 dp2-ep2",
    ),
    Bug(
        "gradients of experts are divided by ep, as if they were replicas",
        "transformers#48687",
        after_sum("each.grad /= self.layout['ep'] if 'moe.w' in name else 1"),
        names=r"^gradient of `.*moe.w\d` .* is 1/2 of the reference: divided by (ep|dp, or ep) \(2\)",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "gradients of queries are summed over the group of all ranks",
        "",
        summed("(*ROWS, *SEQUENCE) if axis not in cut or 'wq' in name"),
        names=r"^gradient of `.*wq.weight` .* is the sum of the parts of all ranks of tp: ",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "shares of the loss are averaged over dp, not summed",
        "",
        after_sum("each.grad /= self.layout['dp']"),
        names=r"^gradient of .* is 1/[23] of the reference: divided by (dp|dp, or cp) \([23]\)",
        layouts="dp2 dp3-cp2",
    ),
    Bug(
        "the loss is divided by cp",
        "Megatron-LM#906, VeOmni#338",
        of_part("batch", "self.layout['cp']"),
        names=r"^gradient of .* is 1/2 of the reference: divided by (cp|dp, or cp) \(2\)",
        layouts="cp2 dp2-cp2 dp3-cp2",
    ),
    Bug(
        "the loss is reported for this rank alone",
        "DeepSpeed#5248",
        [("by_hand", "return self.sum_over(total, (*ROWS, *SEQUENCE))", "return total")],
        names=r"^loss equals the reference after a sum over (dp|dp and tp): that",
    ),
    Bug(
        "a share of the loss is divided by the number of microbatches",
        "",
        of_part("batch", "microbatches"),
        names=r"^gradient of .* is 1/3 of the reference: divided by the number of microbatches \(3\)",
        layouts="dp2 dp2-cp2",
    ),
    Bug(
        "stages divide gradients by the number of microbatches",
        "torch.distributed.pipelining, scale_grads",
        [("pipeline", "scale_grads=False", "scale_grads=True")],
        names=r"^gradient of .* is 1/3 of the reference: divided by the number of microbatches \(3\)",
        plan="pipeline.Plan",
        layouts="pp2 pp2-tp2",
    ),
    Bug(
        "tied embeddings are not summed over stages",
        "piper#13, Megatron-LM#6500",
        [("pipeline", '            self.sum_over(gradient, ("pp",))\n', "")],
        names=r"^gradient of `embed.weight` .*after a sum over pp: that",
        layouts="pp2 pp2-tp2",
        **TIED,
    ),
    Bug(
        "HSDP on the mesh of shards alone",
        "",
        [("with_fsdp2", "self.shard(model, layout.mesh)", "self.shard(model, layout.mesh['fsdp'])")],
        names=r"^gradient of .* after a mean over dp: that",
        plan="with_fsdp2.Plan",
        layouts="dp2-fsdp2",
    ),
    Bug(
        "shares of the loss are not multiplied by the ranks that FSDP averages over",
        "",
        [("with_fsdp2", "(part * ranks).backward()", "part.backward()")],
        names=r"^gradient of .* is 1/[24] of the reference: divided by (fsdp|dp and fsdp) \([24]\)",
        plan="with_fsdp2.Plan",
        layouts="fsdp2 dp2-fsdp2",
    ),
    Bug(
        "DDP synchronizes the first microbatch, not the last",
        "",
        [("with_ddp", "number == microbatches  #", "number == 1  #")],
        names=r"^gradient of .* after a mean over dp: that",
        plan="with_ddp.Plan",
        layouts="dp2",
    ),
    Bug(
        "a gradient that is Partial is taken for a replica",
        "pytorch#172932",
        [("by_dtensor", "    def grad_norm(self):\n", FREEZE)],
        names=r"^gradient of `.*norm.weight` .* after a sum over tp: that",
        plan="by_dtensor.Plan",
        layouts="tp2",
    ),
    Bug(
        "replicas start with other values",
        "",
        [("by_hand", "self.shards.cut(name, each, layout)\n", "each * (1 + layout.at('dp'))\n")],
        names=r"^parameter of .* is right at dp 0 alone: replicas differ",
        layouts="dp2 dp2-cp2",
    ),
    Bug(
        "one replica is scaled, as by a clip by a norm of its own",
        "",
        after_sum("each.grad *= 1 if self.layout.at('dp') else 0.5"),
        names=r"^gradient of .* is right at dp 1 alone: replicas differ",
        layouts="dp2 dp2-tp2",
    ),
    Bug(
        "the gradient of the step before is left in",
        "",
        after_sum("each.grad += getattr(each, 'kept', 0); each.kept = each.grad.clone()"),
        names=r"^gradient of .* is the reference plus that of the step before",
        layouts="dp2",
    ),
    Bug(
        "gradients pass through float32",
        "",
        after_sum("each.grad = each.grad.float().double()"),
        names=r"^gradient of .* is the reference rounded to float32$",
        layouts="dp2",
    ),
    Bug(
        "an optimizer lacks a parameter",
        "",
        [("by_hand", "    def grad_norm(self):\n", OPTIMIZER)],
        names=r"^parameter of `norm.weight` did not move in this step: no optimizer has it",
        layouts="dp2",
    ),
    Bug(
        "an expert without a token has no gradient on one rank",
        "transformers#48687",
        [
            (
                "by_hand",
                "    def grad_norm(self):\n",
                "    def grad_norm(self):\n"
                "        if self.layout.at('ep'):\n"
                "            self.model.layers['1'].moe.w2.grad = None\n"
                "        return torch.zeros((), dtype=torch.float64)\n",
            )
        ],
        names=r"^gradient of `layers.1.moe.w2` is None, .* is not \(ranks? (1|1, 3)\)",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "a rank without a token to predict skips the reduction",
        "Automodel#2995",
        [("by_hand", REDUCE, REDUCE.replace("self", "if (labels[0] >= 0).any():\n            self", 1))],
        layouts="dp2",
        hangs=r"gloo received|all_reduce",
    ),
    Bug(
        "ranks of a ring receive before they send",
        "Megatron-LM#7177, torchtitan#775",
        [
            (
                "ring",
                "    for work in dist.batch_isend_irecv([*sends, *receives]):\n        work.wait()\n",
                "    for each in receives:\n        dist.recv(each.tensor, source, group)\n"
                "    for each in sends:\n        dist.send(each.tensor, to, group)\n",
            )
        ],
        plan="ring.Plan",
        layouts="cp2",
        hangs=r"recv",
    ),
]
