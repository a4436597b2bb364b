"""Count the files that one training step and one warm test enter, and the calls that cross from file to file.

    python benchmarks/calls.py [--list]

A reader who follows a step or a test opens these files. Figures are exact, not timed: functions of a package
are counted by `sys.setprofile`, on the main thread, in an interpreter of its own.

* A step: three Linear layers, each a unit, and a root unit, on torch's fake process group of two ranks; the
  third forward and the third backward are counted, by the engine's two fronts and by torch's FSDP2. A call
  crosses a file when the nearest calling function of the same package lies in another one.
* A test: the third of four equal tests on two warm ranks, from the end of the second to its own end, in the
  controller and in rank 0. `--list` names the files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from figures import Table, describe_machine, write_json

FILES_OF_A_PASS_AT_MOST = 9
CALLS_OF_A_PASS_AT_MOST = 140
# In a rank it was 14 before the files of features/accelerators, which restore how torch computes, and
# rank/dtensor_internals.py.
FILES_OF_A_TEST_AT_MOST = {"controller": 13, "rank": 17}

STEP = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
layers = [nn.Linear(8, 8) for _ in range(3)]
if sys.argv[1] == "wrapper":
    from lockstep.engine import FullyShardedDataParallel
    model = FullyShardedDataParallel(nn.Sequential(*map(FullyShardedDataParallel, layers)))
    import lockstep.engine as package
else:
    if sys.argv[1] == "fully_shard":
        import lockstep.engine as package
    else:
        import torch.distributed.fsdp._fully_shard as package
    fully_shard = package.fully_shard
    for layer in layers:
        fully_shard(layer)
    fully_shard(model := nn.Sequential(*layers))
folder = package.__path__[0]


class Count:
    def __init__(self):
        self.files, self.calls = set(), 0

    def note(self, frame, event, _):
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(folder):
            return
        self.files.add(file.removeprefix(folder + "/"))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(folder):
            caller = caller.f_back
        self.calls += caller is not None and caller.f_code.co_filename != file

    def __enter__(self):
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with Count() as forward:
        loss = model(torch.ones(2, 8)).sum()
    with Count() as backward:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
for passed in (forward, backward):
    print(json.dumps([sorted(passed.files), passed.calls]))
"""

TESTS = """
import pytest

@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(4))
def test_all_reduce(world, i):
    import torch.distributed as dist
    t = world.rank * __import__("torch").ones(4)
    dist.all_reduce(t)
    assert t.tolist() == [1.0] * 4
"""

CONFTEST = """
import json, os, sys
import lockstep

FOLDER = lockstep.__path__[0]
files = set()

def note(frame, event, _):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(FOLDER):
        files.add(file.removeprefix(FOLDER + "/"))

def pytest_runtest_logfinish(nodeid):
    if nodeid.endswith("[1]"):
        sys.setprofile(note)
    elif nodeid.endswith("[2]"):
        sys.setprofile(None)
        with open(os.environ["COUNTED"] + os.environ.get("RANK", "-controller"), "w") as file:
            json.dump(sorted(files), file)
"""


def count_step(front: str) -> dict[str, tuple[list[str], int]]:
    """Return the files and the number of crossing calls of a forward and of a backward."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP, front], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()[-2:]
    return {name: tuple(json.loads(line)) for name, line in zip(("forward", "backward"), lines, strict=True)}


def count_test() -> dict[str, list[str]]:
    """Return the files that a warm test enters in the controller and in rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "test_calls.py").write_text(TESTS)
        (path / "conftest.py").write_text(CONFTEST)
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
            cwd=path,
            env=os.environ | {"COUNTED": str(path / "counted")},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        sides = {"controller": "counted-controller", "rank": "counted0"}
        return {side: json.loads((path / name).read_text()) for side, name in sides.items()}


def show_files(named: Mapping[str, list[str]]) -> None:
    for name, files in named.items():
        print(f"\n{name}: {' '.join(files)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--json", type=Path, help="file for the table")
    wanted, machine = parser.parse_args(), describe_machine()
    rows, named, held = [], {}, []
    for front in ("wrapper", "fully_shard", "FSDP2"):
        for name, (files, calls) in count_step(front).items():
            rows.append([f"{name}, {front}", str(len(files)), str(calls)])
            named[f"{name}, {front}"] = files
            if front != "FSDP2":
                held.append(len(files) <= FILES_OF_A_PASS_AT_MOST and calls <= CALLS_OF_A_PASS_AT_MOST)
    sides = count_test()
    rows += [[f"warm test, {side}", str(len(files)), ""] for side, files in sides.items()]
    held += [len(files) <= FILES_OF_A_TEST_AT_MOST[side] for side, files in sides.items()]
    table = Table(["", "files", "calls that cross a file"], rows)
    print(table)
    write_json(wanted.json, machine, {"all": table})
    print(
        f"wanted: a pass of the engine at most {FILES_OF_A_PASS_AT_MOST} files and {CALLS_OF_A_PASS_AT_MOST} "
        f"calls, a test at most {FILES_OF_A_TEST_AT_MOST['controller']} files in the controller and "
        f"{FILES_OF_A_TEST_AT_MOST['rank']} in a rank: {'held' if all(held) else 'MISSED'}"
    )
    if wanted.list:
        show_files(named | {f"warm test, {side}": files for side, files in sides.items()})
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
