"""`--ranks-adopt-cpu`: adopted tests for accelerators, on gloo and the CPU. And their environment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.adopt import cpu
from lockstep.features.adopt.cpu import PATCHES
from suites.selftest.adopt.verdicts import verdicts_of
from suites.selftest.project import Project

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "adopt_pytorch.md"


def test_tests_for_gpus_run_as_if_there_were_four(project: Project) -> None:
    project.copy("adopt/cpu", "ranks_adopt = torch")
    verdicts = verdicts_of(project, "--ranks-adopt-cpu", "-W", "ignore")
    too_few = {"TestSharded.test_eight": "skipped: Need at least 8 CUDA devices"}
    in_threads = {"TestThreads.test_in_threads": "skipped: Need at least 2 CUDA devices"}
    passed = [
        *(f"TestSharded.test_{name}" for name in ("fsdp", "fully_shard", "ddp", "names_of_devices")),
        "TestSize.test_four",
        "TestKeptGroup.test_fully_shard",
        "TestOnlyCPU.test_device_cpu",
        "TestMesh.test_backend",
        "test_devices.test_plain_ranks_see_the_machine",
    ]
    assert verdicts == dict.fromkeys(passed, "passed") | too_few | in_threads


def test_without_the_option_they_skip_as_torchs_do(project: Project) -> None:
    project.copy("adopt/cpu", "ranks_adopt = torch")
    verdicts = verdicts_of(project, "-W", "ignore", "-k", "TestSharded or TestSize or TestOnly")
    assert {said.partition(":")[0] for said in verdicts.values()} == {"skipped"}
    assert not any(name.startswith("TestOnly") for name in verdicts)


def test_adopted_tests_see_the_environment_of_torchs_children(project: Project) -> None:
    project.copy("adopt/environment", "ranks_adopt = torch")
    assert set(verdicts_of(project, "-W", "ignore").values()) == {"passed"}


def test_the_page_names_each_patch() -> None:
    page = DOCS.read_text()
    assert [patch.name for patch in PATCHES if f"`{patch.name.partition(':')[2]}`" not in page] == []


# In this process


def test_accelerators_are_devices_by_name_or_number() -> None:
    devices = ("cuda", "cuda:1", torch.device("cuda", 1), 0, "cpu", torch.device("cpu"), "cudas", True, None)
    assert [cpu._is_accelerator(device) for device in devices] == [True] * 4 + [False] * 5


def test_cuda_is_the_cpu_in_calls_of_torch() -> None:
    tensor = torch.ones(1)
    with cpu.CudaIsCpu():
        assert tensor.cuda() is tensor
        assert torch.device("cuda:1").type == torch.device(0).type == "cpu"
        assert torch.device("meta").type == "meta"
        made = [torch.zeros(1, device=0), tensor.to("cuda"), tensor.to("cuda", torch.float64)]
        made += [torch.nn.Linear(1, 1).to("cuda:3").weight, tensor.to(device="cuda")]
        assert tensor.to(torch.float64).dtype == torch.float64
        assert torch.empty(1, device="meta").device.type == "meta"
    assert {each.device.type for each in made} == {"cpu"}


def test_what_torch_lacks_is_not_replaced() -> None:
    for name in ("no_such_module:a", "torch:no_such_name", "torch:cuda.no_such_name"):
        with cpu.Patch(name, lambda original: 3, "").apply():
            pass
    with cpu.Patch("torch:cuda.device_count", lambda original: (original, 3), "").apply():
        assert torch.cuda.device_count[1] == 3  # type: ignore[index]
    assert callable(torch.cuda.device_count)


def test_the_machine_has_four_devices_and_only_inside() -> None:
    before = torch.cuda.device_count()
    with cpu.accelerators_on_cpu():
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 4
        assert torch.cuda.current_device() == 0
        assert torch.cuda.set_device(3) is torch.cuda.synchronize() is None
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.cuda.device_count() == before


def original(*args: Any, **options: Any) -> Any:
    return args, options


def test_groups_are_on_gloo_where_an_accelerators_backend_is_named() -> None:
    names = ("nccl", "cpu:gloo,cuda:nccl", "xccl", "hccl", "gloo", None)
    assert [cpu._on_gloo(name) for name in names] == ["gloo"] * 5 + [None]
    make = cpu._group_on_gloo(original)
    assert make("nccl", 1, device_id=3, rank=0) == (("gloo", 1), {"rank": 0})
    assert make() == ((None,), {})
    assert cpu._pg_on_gloo(original)("self", True, "nccl") == (("self", False, "gloo"), {})
    assert cpu._pg_on_gloo(original)("self") == (("self", False, None), {})


def test_models_and_meshes_are_on_the_cpu() -> None:
    device = torch.device("cpu")
    assert cpu._without_device_ids(original)("self", "module", [0], 1, 2, a=3) == (
        ("self", "module", None, None, 2),
        {"a": 3},
    )
    met: list[Any] = []
    keep = lambda *args, **options: met.append((args, options))  # noqa: E731
    cpu._sharded_on_cpu(keep)("self", "module", device_id=3, a=4)
    cpu._mesh_on_cpu(keep)("self", "cuda", 2)
    cpu._mesh_on_cpu(keep)("self", "meta", a=2)
    assert met == [
        (("self", "module"), {"device_id": device, "a": 4}),
        (("self", "cpu", 2), {}),
        (("self", "meta"), {"a": 2}),
    ]


def test_tests_skip_with_more_devices_than_four() -> None:
    def skip_with(function: Any) -> Any:
        return lambda self: "skipped"

    def test(self: object) -> str:
        return "ran"

    decorate = cpu._skip_if_fewer(lambda x, **options: skip_with)
    assert [decorate(number)(test)(object()) for number in (4, 5)] == ["ran", "skipped"]
    assert cpu._skip_if_none(skip_with)(test)(object()) == "ran"
    assert cpu._number(None)() == 4
    assert cpu._nothing(None)(1, a=2) is None


def test_tests_in_threads_of_torchs_skip_as_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class InThreads:
        pass

    monkeypatch.setitem(sys.modules, cpu.COMMON, SimpleNamespace(MultiThreadedTestCase=InThreads))  # type: ignore[arg-type]

    def test(self: object, *args: object, **options: object) -> object:
        return "ran", args, options

    method = cpu._unless_in_threads(test, lambda self, *args, **options: ("skipped", args, options), True)
    assert method(3, 4, a=5) == ("ran", (4,), {"a": 5})
    assert method(InThreads(), 4, a=5) == ("skipped", (4,), {"a": 5})
    assert method.__name__ == "test"


def test_classes_on_ranks_that_are_for_accelerators_are_made_for_the_cpu_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnRanks:
        pass

    monkeypatch.setitem(sys.modules, cpu.COMMON, SimpleNamespace(MultiProcessTestCase=OnRanks))  # type: ignore[arg-type]
    make = cpu._with_cpu(original)
    for cls, given, found in (
        (OnRanks, "cuda", ("cuda", "cpu")),
        (OnRanks, ("cuda", "xpu"), ("cuda", "xpu", "cpu")),
        (OnRanks, None, None),
        (int, "cuda", "cuda"),
    ):
        assert make(cls, "scope", 1, only_for=given) == ((cls, "scope", 1), {"only_for": found})
    assert make(OnRanks, "scope") == ((OnRanks, "scope"), {})


def test_devices_are_seen_at_collection_and_in_adopted_items_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []

    @contextlib.contextmanager
    def on_cpu() -> Iterator[None]:
        met.append("begin")
        yield
        met.append("end")

    monkeypatch.setattr(cpu, "accelerators_on_cpu", on_cpu)
    devices = cpu.CpuDevices(lambda item: item == "adopted")  # type: ignore[comparison-overlap]
    seen = {
        "report": devices.pytest_make_collect_report(),
        "item": devices.pytest_itemcollected(),
        "adopted": devices.pytest_runtest_call("adopted"),  # type: ignore[arg-type]
        "other": devices.pytest_runtest_call("other"),  # type: ignore[arg-type]
    }
    for name, wrapper in seen.items():
        met.clear()
        next(wrapper)
        assert met == (["begin"] if name != "other" else [])
        with pytest.raises(StopIteration) as end:
            wrapper.send(name)
        assert end.value.value == name
        assert met == (["begin", "end"] if name != "other" else [])
