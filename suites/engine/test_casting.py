"""Casts inside the arguments of a forward: every type of container, and unchanged objects. No ranks."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.engine.casting import cast_floating, map_tensors, tensors

BF16, F32 = torch.bfloat16, torch.float32
Pair = namedtuple("Pair", "first second")


class Triple(NamedTuple):
    first: Any
    second: Any
    third: int = 3


class Doubled(Pair):
    """A namedtuple with its own constructor."""

    def __new__(cls, first):
        return super().__new__(cls, first, first)


class Row(list):
    pass


class Table(dict):
    pass


class Couple(tuple):
    pass


@dataclass
class Plain:
    value: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


@dataclass(kw_only=True)
class Derived:
    """A dataclass that `dataclasses.replace` cannot copy: it would lose `value` and require `scale`."""

    scale: InitVar[float]
    value: Any = field(init=False)

    def __post_init__(self, scale):
        self.value = None


def derived(value):
    made = Derived(scale=2.0)
    made.value = value
    return made


@dataclass(init=False)
class Constructed:
    """A dataclass whose constructor is not the generated one."""

    value: Any

    def __init__(self):
        self.value = None


def constructed(value):
    made = Constructed()
    made.value = value
    return made


CONTAINERS = {
    "tuple": lambda x: (x,),
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
    "OrderedDict": lambda x: OrderedDict(x=x),
    "defaultdict": lambda x: defaultdict(list, x=x),
    "deque": lambda x: deque([x], maxlen=7),
    "namedtuple": lambda x: Pair(x, 2),
    "NamedTuple": lambda x: Triple(1, x),
    "subclass of a tuple": lambda x: Couple((x,)),
    "subclass of a list": lambda x: Row([x]),
    "subclass of a dict": lambda x: Table(x=x),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "frozen dataclass with slots": Slotted,
    "dataclass with derived fields": derived,
    "dataclass with its own constructor": constructed,
}
EVERY_CONTAINER = pytest.mark.parametrize("contain", CONTAINERS.values(), ids=CONTAINERS)


@EVERY_CONTAINER
@pytest.mark.parametrize("around", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_are_cast_in_every_pair_of_nested_containers(around, contain):
    inner, counted = torch.ones(2), torch.arange(2)
    tree = around([contain(inner), counted])
    found = cast_floating(BF16, tree)
    assert [t.dtype for t in tensors(found)] == [BF16, torch.int64]
    assert type(found) is type(tree)
    assert tensors(found)[1] is counted
    assert tensors(tree)[0] is inner  # what the caller holds is as it was


@EVERY_CONTAINER
def test_a_container_with_nothing_to_cast_is_the_same_object(contain):
    tree = contain([torch.ones(2, dtype=BF16), torch.arange(2), "text", None])
    assert cast_floating(BF16, tree) is tree


def test_everything_but_the_cast_tensor_is_the_same_object():
    untouched = [object(), [1, 2], {"a": 1}, Plain("text"), nn.Linear(2, 2), torch.arange(3), Pair, Plain]
    found = cast_floating(BF16, {"tensor": torch.ones(2), "rest": (torch.ones(2), *untouched)})
    assert all(map(lambda a, b: a is b, found["rest"][1:], untouched))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_only_floating_point_tensors_are_cast(dtype):
    tensor = torch.ones(2).to(dtype)
    assert cast_floating(BF16, (tensor,))[0] is tensor


def test_copies_keep_attributes_of_container_subclasses():
    table = Table(x=torch.ones(2))
    table.name = "attribute"
    casted = cast_floating(BF16, [table, defaultdict(list, x=torch.ones(2)), deque([torch.ones(2)], 7)])
    assert (casted[0].name, casted[1].default_factory, casted[2].maxlen) == ("attribute", list, 7)


def test_a_packed_sequence_keeps_its_batch_sizes():
    packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    found = cast_floating(BF16, packed)
    assert isinstance(found, PackedSequence)
    assert found.data.dtype == BF16
    assert found.batch_sizes is packed.batch_sizes
    seen = tensors(packed)
    assert [t.dtype for t in seen] == [F32, torch.int64, torch.int64]
    assert all(t is not packed.batch_sizes for t in seen)  # nor moved: torch wants them on CPU


def test_torch_return_types_are_traversed():
    found = cast_floating(BF16, torch.ones(2, 2).max(0))
    assert (found.values.dtype, found.indices.dtype) == (BF16, torch.int64)
    assert type(found) is torch.return_types.max


def test_the_gradient_of_a_cast_tensor_is_cast_back():
    x = torch.ones(2, requires_grad=True)
    cast_floating(BF16, Frozen([x])).value[0].sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (F32, [1.0, 1.0])


def test_map_tensors_replaces_tensors_by_results():
    parts = (torch.zeros(1), [torch.zeros(1)])
    assert [t.item() for t in tensors(map_tensors(lambda t: t + 1, parts))] == [1.0, 1.0]


def test_an_unset_dataclass_field_is_skipped():
    made = derived(None)
    del made.value
    assert cast_floating(BF16, made) is made


def test_a_namedtuple_with_its_own_constructor_is_cast():
    found = cast_floating(BF16, Doubled(torch.ones(2)))
    assert [t.dtype for t in found] == [BF16, BF16]
    assert isinstance(found, Doubled)
    assert isinstance(found[0], Tensor)
