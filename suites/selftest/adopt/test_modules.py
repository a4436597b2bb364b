"""Variables of modules, which are put back after an adopted test."""

from __future__ import annotations

from types import ModuleType

import torch

from lockstep.features.adopt import modules


def test_variables_of_a_package_are_put_back(package: tuple[ModuleType, ModuleType]) -> None:
    module, other = package
    items, names, members = module.items, module.names, module.members
    with modules.restored("left_over"):
        for each in package:
            vars(each).update(one=7, new=3, below=ModuleType("left_over.below"), __hidden__=1)
            del each.gone
            each.items.append(3)
            each.names["a"] = 5
            each.members.add(2)
        module.text = "b"
    assert (module.one, module.gone, module.text, hasattr(module, "new")) == (1, 2, "a", False)
    assert (module.items, module.names, module.members) == ([1, 2], {"a": 1}, {1})
    assert module.items is items
    assert module.names is names
    assert module.members is members
    assert (module.below.__name__, module.__hidden__) == ("left_over.below", 1)
    assert (other.one, other.new, other.items, other.members) == (7, 3, [1, 2, 3], {1, 2})


def test_collections_are_put_back_by_identity(package: tuple[ModuleType, ModuleType]) -> None:
    module, _ = package
    module.items[0] = first = torch.zeros(2)
    module.names["a"] = value = torch.ones(2)
    with modules.restored("left_over"):
        module.items[0], module.names["a"] = torch.zeros(2), torch.ones(2)
        module.members.clear()
        module.members.add(5)
    assert module.items[0] is first
    assert module.names["a"] is value
    assert module.members == {1}
    with modules.restored("left_over"):
        module.names["b"] = module.names.pop("a")
    assert list(module.names) == ["a"]


def test_without_a_package_nothing_is_put_back(package: tuple[ModuleType, ModuleType]) -> None:
    with modules.restored(""):
        package[0].one = 9
    assert package[0].one == 9


def test_modules_below_a_package_are_of_it() -> None:
    assert [modules._is_of(name, "a.b") for name in ("a.b", "a.b.c", "a.bc", "a")] == [
        True,
        True,
        False,
        False,
    ]
