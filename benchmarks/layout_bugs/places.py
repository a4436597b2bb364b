"""Lines of by_hand.py that many bugs replace."""

AXES = "for axis in (*ROWS, *SEQUENCE) if axis not in cut]"
SUM = f"            self.sum_over(each.grad, [axis {AXES})\n"
PART = "            part = self.share(self.model(each), wanted, batch)\n"
MODEL = "self.model(each), wanted"
LOOP = "for each, wanted in zip(tokens, labels, strict=True):"
BACKWARD = "            part.backward()\n"
REDUCE = "        self.reduce_gradients()\n        return"
NORM = "total += self.sum_over(each.grad.square().sum(), self.shards.axes(name))"
ROOT = "return total.sqrt()"


def summed(axes: str) -> list[tuple[str, str, str]]:
    """Return the edit of the axes over which a gradient is summed."""
    return [("by_hand", AXES, f"for axis in {axes}]")]


def after_sum(line: str) -> list[tuple[str, str, str]]:
    """Return the edit that adds a line after the sum of each gradient."""
    return [("by_hand", SUM, f"{SUM}            {line}\n")]


def of_part(whole: str, divisor: str = "1") -> list[tuple[str, str, str]]:
    """Return the edit of the batch by which a share of the loss is divided, and of a divisor of it."""
    return [("by_hand", PART, PART.replace("batch)", f"{whole}) / {divisor}"))]
