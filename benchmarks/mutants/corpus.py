"""Bugs that real engines had, each as an edit of ours. Issues of pytorch/pytorch, if none is named."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Injection:
    """The text `before`, which stands once in `file`, becomes `after`."""

    file: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        return source.replace(self.before, self.after)


AS_ONE = "        if shard.layout.in_order:\n            self._arrive ="
FILLED = "flat += self._accumulated\n            self._accumulated = None"
CLEARED = "copy_in(sent, flat, layout)\n        for leaf in full.leaves:\n            leaf.grad = None\n"
GATHERED = '    (GroupState.PREFETCHED, "reshard"): GroupState.SHARDED,\n'
LOADED = "values = full.reshape(-1)[original.piece.start : original.piece.stop]"
GRADIENTS = "for gradient in _local_gradients(optimizer):\n"
REFUSED = (
    '            if gradient.dtype is torch.float16:\n                raise ValueError("FP16 gradients")\n'
)
UNCAST = """        if shard.layout.in_order and not self._part:
            wide = flat.new_empty(full.buffer.numel())
            wait = collectives.start_gather(wide, flat, axis)
            self._arrive = lambda: full.buffer.copy_(wait())
            return
"""
CORPUS = {
    "#190626: reduce_dtype is ignored": Injection(
        "unsharded.py", "reduce = mixed.reduce_dtype or compute", "reduce = compute"
    ),
    "#103862: inputs are cast in full-precision eval": Injection(
        "unit.py",
        "self._cast_inputs((args, kwargs), self.precision.now)",
        "self._cast_inputs((args, kwargs), self.precision.given)",
    ),
    "#143900: buffer_dtype is ignored": Injection(
        "unit.py", "self.buffers.prepare(self.precision.now.buffer_dtype,", "self.buffers.prepare(None,"
    ),
    "#77439: buffers of ignored modules are cast": Injection(
        "init.py",
        "_own_modules(modules, lambda m: is_unit(m) or m in config.ignored.modules)",
        "_own_modules(modules, is_unit)",
    ),
    "fairscale#704: buffers are saved in low precision": Injection(
        "wrapper_state.py", "found[key] = found[key].to(dtype)", "pass"
    ),
    "#154975: parameters travel before their cast": Injection("param_group.py", AS_ONE, UNCAST + AS_ONE),
    "#148831: casts are left out in recomputation": Injection(
        "unit.py",
        "        args, kwargs = self._cast_inputs(",
        "        if not recomputed:\n            args, kwargs = self._cast_inputs(",
    ),
    "accelerate#3979: the optimizer works in param_dtype": Injection(
        "param.py",
        "new_zeros(layout.shard_numel)",
        "new_zeros(layout.shard_numel, dtype=config.mixed_precision.param_dtype)",
    ),
    "#115710: found_inf is read before its all-reduce ended": Injection(
        "collectives.py",
        "dist.all_reduce(values, group=group)",
        "dist.all_reduce(values, group=group, async_op=True)",
    ),
    "#99174: a rank with empty shards does not join": Injection(
        "grad_scaler.py",
        "[over] if over else []",
        "[over] if over and any(map(Tensor.numel, gradients)) else []",
    ),
    "fairscale#834: fp16 gradients are refused": Injection(
        "grad_scaler.py", f"        {GRADIENTS}", f"        {GRADIENTS}{REFUSED}"
    ),
    "#162338: the mean is the sum": Injection("collectives.py", "summed.div_(divisor)", "pass"),
    "#167178: a divide factor is ignored at degree 1": Injection(
        "collectives.py", "(full if divisor == 1 else full.div_(divisor)).to(dtype)", "full.to(dtype)"
    ),
    "#144045: a small parameter has no gradient": Injection(
        "gradients.py",
        "fresh = reduced[span].view_as(parameter)",
        "fresh = reduced[span].view_as(parameter) * (span.stop - span.start > 1)",
    ),
    "#73784: offload replaces the first gradient": Injection(
        "gradients.py",
        "            if (gradient := _dense_gradient(parameter)) is None:",
        "            if (gradient := _dense_gradient(parameter)) is None or self._shard.config.offload:",
    ),
    "#98494: unsynced gradients are lost with offload": Injection(
        "gradients.py",
        "            if gradient is not None:\n                full[span] +=",
        "            if gradient is not None and not self._shard.config.offload:\n"
        "                full[span] +=",
    ),
    "DeepSpeed#7985: microbatches leak into the next step": Injection(
        "gradients.py", "self._unsynced, self._synced = False, {}", "self._synced = {}"
    ),
    "DeepSpeed#7985, composable": Injection("gradients.py", FILLED, "flat += self._accumulated"),
    "accelerate#3762: no_sync reduces": Injection("root.py", "        if not sync:", "        if False:"),
    "fairscale#513: a gradient is reduced twice": Injection(
        "gradients.py", CLEARED, CLEARED.partition("\n")[0] + "\n"
    ),
    "DeepSpeed#988: done after each nested backward": Injection(
        "unit.py",
        "return everywhere and (backward == self.root_state.backward or self._recomputed)",
        "return everywhere",
    ),
    "#87413: gradients without a callback are not reduced": Injection(
        "unit.py", "if any(leaf.grad is not None for leaf in full.leaves):", "if False:"
    ),
    "#149205: an optimizer made after a forward steps nothing": Injection(
        "param.py",
        "        if self._flat_ref:\n            self._flat_ref.put(self.flat)",
        "        if self._flat_ref:\n            self._flat_ref.put(nn.Parameter(self.flat.data.clone()))",
    ),
    "#88955: the norm is of this rank's shards": Injection("grad_scaler.py", "[over] if over else []", "[]"),
    "#88955: the norm counts what is whole once for each rank": Injection(
        "grad_scaler.py",
        "held[axis.group if axis else None] +=",
        "held[axis.group if axis else group.config.mesh.process_group] +=",
    ),
    "#178569: replicas start from other states": Injection(
        "init.py",
        "collectives.broadcast(states, config.mesh.groups)",
        "collectives.broadcast(states, config.mesh.groups[:1])",
    ),
    "#102821: uneven shards are saved as if even": Injection(
        "state_dict.py", "tensor.chunk(mesh.size(-1))", "tensor.tensor_split(mesh.size(-1))"
    ),
    # There state that was loaded did not get to what the optimizer of uneven shards steps with.
    "torchtitan#1136: what is loaded does not get to uneven shards": Injection(
        "optim_state.py",
        LOADED,
        f"{LOADED}\n        values = values * (full.numel() % param.shard.layout.num_shards == 0)",
    ),
    "#137348: what was gathered for nothing is used later": Injection("param_group.py", GATHERED, ""),
    "#137348: what was gathered for nothing stays": Injection(
        "param_group.py",
        "        if self.state is GroupState.PREFETCHED and self._pinned is None:\n"
        "            self.reshard()",
        "        pass",
    ),
    "weights of an evaluation serve the next, over a step": Injection(
        "param_group.py",
        "if self._pinned is None or self._pinned != self.shard.versions:",
        "if self._pinned is None:",
    ),
}
