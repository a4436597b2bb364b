"""Known bugs: parts of the loss that are lost, count otherwise, or are divided by other counts."""

from bug import Bug
from places import BACKWARD, LOOP, MODEL, of_part

PLAIN = {"plan": "plain.Plan", "model": "plain.build"}
RICH = {"plan": "rich.Plan", "model": "rich.build"}
MINE = "return self.layout.slice(self.layout.slice(tensor, ROWS), SEQUENCE, dim=1)"
TOKENS = '(whole["labels"] >= 0).sum()'
OF_ROWS = of_part("{'labels': self.layout.slice(batch['labels'], ROWS)}", "self.layout.part(ROWS)[1]")
WIPED = [("by_hand", BACKWARD, f"            self.model.zero_grad()\n{BACKWARD}")]


def penalty_times(factor: str) -> list[tuple[str, str, str]]:
    """Return the edit that multiplies the auxiliary loss."""
    changed = f"(lambda x, penalty: (x, penalty * {factor}))(*self.model(each)), wanted"
    return [("by_hand", MODEL, changed)]


BUGS = [
    Bug(
        "each dp part is divided by its own tokens",
        "prime-rl#1957",
        OF_ROWS,
        names=r"^gradient of .* is a mean of the means of each dp part",
        layouts="dp2 dp2-tp2 dp2-cp2",
        **PLAIN,
    ),
    Bug(
        "each dp part is divided by its own tokens, beside an auxiliary loss",
        "prime-rl#1957",
        [*OF_ROWS, ("model", TOKENS, f"{TOKENS}.clamp(min=1)")],
        names=r"^gradient of .* is a mean of the means of each dp part",
    ),
    Bug(
        "each cp part is divided by its own tokens",
        "VeOmni#419",
        of_part("{'labels': self.layout.slice(batch['labels'], 'cp', 1)}", "self.layout['cp']"),
        names=r"^gradient of .* is a mean of the means of each sequence part",
        layouts="cp2 dp2-cp2",
        **PLAIN,
    ),
    Bug(
        "each microbatch is divided by its own tokens",
        "transformers#34191",
        [
            ("by_hand", LOOP, "for number, (each, wanted) in enumerate(zip(tokens, labels, strict=True)):"),
            *of_part("{'labels': batch['labels'].chunk(microbatches)[number]}", "microbatches"),
        ],
        names=r"^gradient of .* is a mean of the means of each microbatch",
        layouts="cp2 tp2",
        **PLAIN,
    ),
    Bug(
        "gradients of all microbatches but the last are wiped",
        "Automodel#3530",
        WIPED,
        names=r"^gradient of .* lacks microbatches 0, 1 of 3",
        layouts="dp2 dp2-cp2",
        **PLAIN,
    ),
    Bug(
        "gradients of all microbatches but the last are wiped, beside an auxiliary loss",
        "Automodel#3530",
        WIPED,
        names=r"^gradient of .* \(and 22 more of 23\) lacks microbatches 0, 1 of 3$",
    ),
    Bug(
        "the last microbatch is lost",
        "",
        [
            (
                "by_hand",
                BACKWARD,
                "            if microbatches == 1 or each is not tokens[-1]:\n"
                "                part.backward()\n",
            )
        ],
        names=r"^gradient of .* lacks microbatch 2 of 3",
        **PLAIN,
    ),
    Bug(
        "a rank of dp adds nothing",
        "Automodel#3701",
        [("by_hand", BACKWARD, "            (part * (self.layout.at('dp') == 0)).backward()\n")],
        names=r"^gradient of .* lacks dp part 1 of 2",
        layouts="dp2 dp2-cp2",
        **PLAIN,
    ),
    Bug(
        "the last rank of cp adds nothing",
        "",
        [("by_hand", BACKWARD, "            (part * (self.layout.at('cp') == 0)).backward()\n")],
        names=r"^gradient of .* lacks (sequence part 1 of 2|row and sequence parts 1, 3 of 4)",
        layouts="cp2 dp2-cp2",
        **PLAIN,
    ),
    Bug(
        "all ranks of dp read the first part",
        "",
        [("by_hand", MINE, MINE.replace("self.layout.slice(tensor, ROWS)", "tensor.chunk(2)[0]"))],
        names=r"^gradient of .* (lacks|counts) dp parts? ",
        layouts="dp2",
        **PLAIN,
    ),
    Bug(
        "ranks of ep read the same rows",
        "",
        [("by_hand", MINE, MINE.replace("ROWS", "'dp'"))],
        names=r"^gradient of .* is 2 times the reference: multiplied by (ep|dp, or ep) \(2\)",
        layouts="ep2 dp2-ep2",
    ),
    Bug(
        "a rank without a token to predict divides by zero, and its gradient is nan",
        "Automodel#2995",
        [
            (
                "plain",
                'labels.flatten(), reduction="sum")\n',
                'labels.clamp(min=0).flatten(), reduction="none")\n    count = (labels >= 0).sum()\n'
                "    entropy = (entropy * (labels >= 0).flatten()).sum() / count * count\n",
            )
        ],
        names=r"^gradient of .* is not finite on ranks? ",
        **PLAIN,
    ),
    Bug(
        "a rank without a token to predict divides by zero, and its loss is nan",
        "Automodel#2995",
        [
            ("plain", 'reduction="sum")', 'reduction="mean")'),
            (
                "plain",
                "    return entropy / ",
                "    entropy = entropy * (labels >= 0).sum()\n    return entropy / ",
            ),
        ],
        names=r"^loss is (not finite|nan) on ranks? ",
        layouts="dp2",
        **PLAIN,
    ),
    Bug(
        "the number of tokens is a float32",
        "",
        [("plain", f"entropy / {TOKENS}.clamp(min=1)", f"entropy * (1 / {TOKENS}.clamp(min=1)).float()")],
        names=r"^gradient of .* is 1 [-+][\d.e-]+ times the reference: float32",
        layouts="dp2",
        **PLAIN,
    ),
    Bug(
        "the auxiliary loss is left out",
        "",
        penalty_times("0"),
        names=r"^gradient of .* lacks the term `penalty` of the loss",
    ),
    Bug(
        "the auxiliary loss counts on each rank of tp",
        "",
        penalty_times("self.layout['tp']"),
        names=r"the term `penalty` of the loss as 2 times the reference(: multiplied by (tp|dp, or tp) |$)",
        layouts="tp2 dp2-tp2",
    ),
    Bug(
        "the auxiliary loss counts in each microbatch as if it were the whole",
        "",
        penalty_times("microbatches"),
        names=r"the term `penalty` of the loss as 3 times .*: multiplied by the number of microbatches",
    ),
    Bug(
        "the count of tokens of experts is summed over tp and cp twice, in place",
        "Megatron-LM#7452",
        [
            (
                "rich",
                "        return counts\n\n\nclass Plan",
                "            group = self.layout.group(*by_hand.SEQUENCE)\n"
                "            torch.distributed.all_reduce(counts, group=group)\n"
                "        return counts\n\n\nclass Plan",
            )
        ],
        names=r"the term `balance` of the loss as 2 times the reference"
        r"(: multiplied by (cp|tp|dp, or cp|dp, or tp) |$)",
        layouts="tp2 cp2 dp2-tp2",
        **RICH,
    ),
    Bug(
        "the count of tokens of experts is this rank's",
        "",
        [("rich", "        counts = self.ops.count(counts)  # of each sequence\n", "")],
        module=r"experts.gate",
        layouts="tp2 cp2",
        **RICH,
    ),
    Bug(
        "the loss of the second head is divided by the tokens of the first",
        "Megatron-LM#7452",
        [("rich", '/ (whole["labels"][..., 1] >= 0).sum()', '/ (whole["labels"][..., 0] >= 0).sum()')],
        names=r"^gradient of `second.weight` .* has the term `second` of the loss as 0.857143 times ",
        layouts="tp2",
        **RICH,
    ),
    Bug(
        "the loss of the second head is divided by this rank's tokens",
        "Megatron-LM#7498",
        [
            *of_part("batch, self.layout"),
            ("rich", "def share(output, labels, whole):", "def share(output, labels, whole, layout=None):"),
            (
                "rich",
                "    return entropy + second_share(output, labels, whole) +",
                "    mine = layout.slice(whole['labels'], 'cp', 1)\n"
                "    return entropy + second_share(output, labels, {'labels': mine}) / layout['cp'] +",
            ),
        ],
        names=r"^gradient of `second.weight` .* has a wrong term `second` .* mean of .* each sequence part",
        module=r"second",
        layouts="cp2 dp2-cp2",
        **RICH,
    ),
    Bug(
        "gathered logits in a loss that sums over the vocabulary's ranks",
        "Megatron-LM#7452",
        [
            (
                "vocab_parallel",
                "return F.linear(by_hand.Gather.apply(x, 1, self.group), self.weight)",
                "logits = F.linear(by_hand.Gather.apply(x, 1, self.group), self.weight)\n"
                "        return by_hand.Gather.apply(logits, 2, self.group)",
            )
        ],
        names=r"^loss is .*log\(?.?2\b.*tp",
        plan="vocab_parallel.Plan",
        layouts="tp2 ep2-tp2",
    ),
]
