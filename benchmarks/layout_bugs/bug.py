"""An entry of the benchmark: one bug, planted in one right plan.

A file of entries is a module of this folder with a list `BUGS`; `ENTRIES` in files.py names them. An entry is

    Bug(
        "gradient of the router lacks the sum over tp",  # unique
        "torchtitan#2387",  # the public report that it stands for, or ""
        [("by_hand", AXES, f"{AXES[:-1]} and not ('router' in name and axis == 'tp')]")],
        names=r"^gradient of `.*router.weight` .* after a sum over tp: that",
        layouts="tp2 dp2-tp2",
    ),

`edits` are (module, before, after): `before` stands exactly once in the source of that module, which is one
of examples/layouts or of this folder. The plan, and the model that it is given, are of the edited modules;
the unsharded reference is not. places.py has lines that many entries replace. Plans to plant in:

    by_hand.Plan                  dp, ep, cp, tp
    vocab_parallel.Plan           with tp, and ep, cp
    ring.Plan, ulysses.Plan       with cp, and dp, ep, tp
    pipeline.Plan                 with pp, and dp, ep, cp, tp
    with_ddp.Plan                 dp
    with_fsdp2.Plan               fsdp, and dp
    by_dtensor.Plan               fsdp, tp
    few_kv.Plan                   tp4: more ranks than heads of keys
    plain.Plan with plain.build   by_hand without the auxiliary loss
    rich.Plan with rich.build     dp, cp, tp: packed weights, biases, a sink of attention, dropout,
                                  a balance loss, a second head

What is planted must be wrong by itself on each of its layouts; without edits the plan must hold there,
which the benchmark checks, too. First the smallest layout, on 2 ranks if possible, then one with an axis
next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A bug, and what a report on it must say.

    Attributes:
        name: of the bug, unique.
        stands_for: the public report that it stands for, "" if there is none.
        edits: (module, before, after), as above.
        names: a regular expression that the first sentence of the report must match if it names a cause: with
            the operation, and the axes, so that no other would match; "" if it must name none.
        module: a regular expression that the module of the line "first divergence" must match from its
            beginning, for what is no single change; "" if it does not matter.
        layouts: to run, with blanks between them.
        plan: module and class of the trainer.
        model: module and function that builds the unsharded model; the module has `loss`, `BATCHES`, `TERMS`.
        shards: module and name of the shard map; the plan's own `shards` by default.
        microbatches: of each step.
        hangs: a regular expression for what pytest says of a bug that never returns; "" if it does.
    """

    name: str
    stands_for: str
    edits: Sequence[tuple[str, str, str]]
    names: str = ""
    module: str = ""
    layouts: str = "dp2 dp2-tp2"
    plan: str = "by_hand.Plan"
    model: str = "tiny.build"
    shards: str = ""
    microbatches: tuple[int, ...] = (1, 3, 1)
    hangs: str = ""
