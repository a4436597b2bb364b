"""Known bugs that are no single change of a gradient: the module where forward or backward goes wrong."""

from bug import Bug

RICH = {"plan": "rich.Plan", "model": "rich.build"}
RING = {"plan": "ring.Plan", "layouts": "cp2 cp2-tp2"}
ATTEND = "return causal_attention(q, k, v, self.positions(q.shape[2]))"
FIRST = "        return self.layout.part(by_hand.SEQUENCE)[0] * x.shape[1]\n"
UP_AND_DOWN = "self.ops.leave(self.down(F.silu(self.up(self.ops.enter(x)))))"

BUGS = [
    Bug(
        "positions under cp begin at zero on each rank",
        "VeOmni#419",
        [
            ("by_hand", 'torch.arange(length) + self.layout.at("cp") * length', "torch.arange(length)"),
            (
                "by_hand",
                ATTEND,
                "first = self.layout.at('cp') * q.shape[2]\n"
                "        return causal_attention(q, k, v, torch.arange(q.shape[2]) + first)",
            ),
        ],
        module=r"layers.0.attention",
        layouts="cp2 dp2-cp2",
    ),
    Bug(
        "the mask under cp is that of the first part",
        "",
        [("by_hand", ATTEND, "return causal_attention(q, k, v, torch.arange(q.shape[2]))")],
        module=r"layers.0.attention",
        layouts="cp2 cp2-tp2",
    ),
    Bug(
        "keys and values in the ring's backward are stale",
        "Megatron-LM#1464, TransformerEngine#1557",
        [("ring", "k, v, of_k, of_v = ring\n", "_, _, of_k, of_v = ring\n")],
        module=r"layers.1.attention.w[qkv]",
        **RING,
    ),
    Bug(
        "the ring does not send gradients of keys and values on",
        "diffusers#14265",
        [("ring", "pass_on([k, v, of_k, of_v], ctx.group)", "[*pass_on([k, v], ctx.group), of_k, of_v]")],
        module=r"layers.1.attention.w[kv]",
        **RING,
    ),
    Bug(
        "the ring gives keys no gradient",
        "diffusers#11941",
        [("ring", "return of_q, ring[2],", "return of_q, torch.zeros_like(ring[2]),")],
        names=r"^gradient of `layers.\d.attention.wk.weight` .*is zero on all ranks",
        module=r"layers.1.attention.wk",
        **RING,
    ),
    Bug(
        "the ring does not rescale what it has summed",
        "",
        [("ring", "total = total * (log_sum - more).exp() + (scores", "total = total + (scores")],
        module=r"layers.0.attention",
        **RING,
    ),
    Bug(
        "Ulysses repeats heads of keys in another order",
        "LlamaFactory#10794",
        [("ulysses", "each.repeat_interleave(copies, 1)", "each.repeat(1, copies, 1, 1)")],
        module=r"layers.0.attention",
        plan="ulysses.Plan",
        layouts="cp4",
    ),
    Bug(
        "ranks that share a head of keys do not sum its gradient",
        "transformers#48307",
        [("few_kv", 'self.sum_over(whole, ("tp",))\n                each', "each")],
        names=r"^gradient of `.*w[kv].weight` .* after a sum over the ranks of tp that hold the same part",
        module=r"layers.1.attention.w[kv]",
        plan="few_kv.Plan",
        layouts="tp4",
    ),
    Bug(
        "a rank takes the wrong head of keys",
        "LlamaFactory#10794",
        [("few_kv", "head = index * KV_HEADS // count", "head = index % KV_HEADS")],
        names=r"^parameter of `.*w[kv].weight` .* is right on ranks 0, 3 alone: replicas differ",
        plan="few_kv.Plan",
        layouts="tp4",
    ),
    Bug(
        "packed weights are cut whole",
        "",
        [("rich", 'Sharded("tp", parts=(WIDTH, WIDTH, WIDTH))', 'Sharded("tp")')],
        names=r"^parameter of `attention.wqkv.(bias|weight)`.* in another order: a packed weight cut whole",
        layouts="tp2 dp2-tp2",
        **RICH,
    ),
    Bug(
        "a bias is added on each rank before the sum over tp",
        "torchtitan#2106",
        [
            (
                "rich",
                "self.ops.leave(self.wo(mixed)) + self.bias",
                "self.ops.leave(self.wo(mixed) + self.bias)",
            )
        ],
        module=r"attention$",
        layouts="tp2 dp2-tp2",
        **RICH,
    ),
    Bug(
        "a scalar is added to a partial sum",
        "pytorch#163193",
        [("rich", f"{UP_AND_DOWN} + 0.1", f"{UP_AND_DOWN[:-1]} + 0.1)")],
        module=r"experts$",
        layouts="tp2 dp2-tp2",
        **RICH,
    ),
    Bug(
        "masks of dropout are equal on ranks with other parts of the sequence",
        "tt-metal#55947",
        [("rich", FIRST, "        return 0\n")],
        module=r"experts_norm",
        layouts="tp2 cp2",
        **RICH,
    ),
    Bug(
        "masks of dropout are drawn by rank",
        "PaddleFleetX#1005",
        [("rich", FIRST, "        return self.layout.rank * x.shape[1]\n")],
        module=r"experts_norm",
        layouts="dp2 dp2-tp2",
        **RICH,
    ),
    Bug(
        "the gradient of a gathered sequence is cut, not summed over tp",
        "",
        [
            (
                "by_hand",
                "        return reduce_scatter(gradient, *ctx.where), None, None",
                "        dim, group = ctx.where\n"
                "        return gradient.chunk(group.size(), dim)[group.rank()].contiguous(), None, None",
            )
        ],
        module=r"layers.1.moe(.router|_norm)$",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "what tp has computed is cut, not summed",
        "",
        [
            (
                "by_hand",
                "        return reduce_scatter(x, dim, group)\n",
                "        return x.chunk(group.size(), dim)[group.rank()].contiguous()\n",
            )
        ],
        module=r"layers.0.attention$",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "tokens reach experts in the order of their senders",
        "",
        [("by_hand", "order = expert.argsort(stable=True)", "order = torch.arange(len(expert))")],
        module=r"layers.0.moe$",
        layouts="ep2 ep2-tp2",
    ),
    Bug(
        "the weights of experts have no gradient",
        "torchtitan#2387",
        [("model", "* weights.flatten()[order, None]", "* weights.detach().flatten()[order, None]")],
        module=r"layers.1.moe.router$",
        layouts="tp2 ep2",
    ),
]
