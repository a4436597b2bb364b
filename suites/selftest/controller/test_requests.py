"""Requests of items, options that are refused, and the line that runs an item again."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.backends.device import Device
from lockstep.controller import requests
from lockstep.controller.option_checks import check_folder, check_options, output_directory_of
from lockstep.controller.requests import REFUSAL, Refusal, Request, report_refusal, request_of
from lockstep.controller.rerun import rerun_line
from lockstep.marker import MarkError, RanksMark
from lockstep.specification import WorldKey
from suites.selftest.controller.stand_ins import INI, Hooks, config_of, item_of


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"world_timeout": 0.0}, "--world-timeout 0.0: write a number of seconds above 0, at most 1000000"),
        ({"world_seed": 2**64}, f"--world-seed {2**64}: write a whole number from -2**63 to 2**64 - 1"),
        ({"subtest": ["x"]}, "--subtest 'x': write KEY=VALUE,KEY=VALUE"),
        ({"rank_output_dir": "x", "capture": "no"}, "--rank-output-dir: with -s no output is captured"),
        ({"rank_output_dir": ""}, "--rank-output-dir '': write the path of a folder"),
        ({"rank_output_dir": "file/x"}, "--rank-output-dir: cannot make the folder: "),
        ({"ranks_backend": "tcp"}, "--backend: "),
        (
            {"ranks_backend": "gloo", "ranks_device": "warp"},
            "--backend gloo does not work with --device warp",
        ),
        ({"ranks_device": "warp"}, "--device warp: "),
    ],
)
def test_an_option_that_no_world_can_satisfy_is_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(why)}"):
        check_options(config_of(tmp_path, **options))


@pytest.mark.parametrize("name", INI)
def test_an_ini_option_has_one_of_its_choices(tmp_path: Path, name: str) -> None:
    choices = {"ranks_start_method": "forkserver, spawn", "ranks_leaks": "warn, error, off"}[name]
    with pytest.raises(pytest.UsageError, match=f"^{name} = 'fork': choose {choices}$"):
        check_options(config_of(tmp_path, INI | {name: "fork"}))
    for choice in choices.split(", "):
        check_options(config_of(tmp_path, INI | {name: choice}))


@pytest.mark.parametrize(
    "options",
    [
        {"capture": "no"},
        {"ranks_backend": "gloo", "ranks_device": "cpu", "world_seed": -(2**63)},
        {"ranks_backend": "fake", "subtest": ["a=1"]},
    ],
)
def test_options_that_worlds_can_satisfy_are_taken(tmp_path: Path, options: dict[str, Any]) -> None:
    check_options(config_of(tmp_path, **options))
    assert [*tmp_path.iterdir()] == []


def test_devices_that_this_machine_lacks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have = 0
    monkeypatch.setattr(Device, "count", lambda device: have)
    lack = "this machine has no GPU; run with --backend gloo --device cpu"
    for options, requested in (
        ({"ranks_backend": "nccl"}, "--backend nccl"),
        ({"ranks_device": "cuda"}, "--device cuda"),
        ({"ranks_backend": "gloo", "ranks_device": "cuda"}, "--device cuda"),
    ):
        with pytest.raises(pytest.UsageError, match=f"^{requested}: {lack}$"):
            check_options(config_of(tmp_path, **options))
    have = 1
    check_options(config_of(tmp_path, ranks_backend="gloo", ranks_device="cuda"))


def test_the_folder_of_an_option_is_made_from_where_pytest_runs(tmp_path: Path) -> None:
    config = config_of(tmp_path, rank_output_dir="out/of")
    assert output_directory_of(config) == str(tmp_path / "out" / "of")
    assert output_directory_of(config_of(tmp_path)) == ""
    check_options(config)
    check_options(config)
    assert (tmp_path / "out" / "of").is_dir()


def test_a_folder_is_left_to_the_workers_of_xdist(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    check_folder(config_of(tmp_path, dist="load"), "--x", "there/new/below")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    check_folder(config_of(tmp_path, dist="no"), "--x", "one")
    check_folder(config_of(tmp_path), "--x", None)
    worker = config_of(tmp_path)
    worker.workerinput = {}
    check_folder(worker, "--x", "two")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["one", "there"]


def resolved(folder: Path, mark: RanksMark, hooks: Hooks | None = None, **given: Any) -> Any:
    return requests._resolve(item_of(config_of(folder, hooks=hooks or Hooks(), **given)), mark, None)


def test_a_request_has_what_the_mark_says_and_else_the_options(tmp_path: Path) -> None:
    plain = resolved(tmp_path, RanksMark((2,)))
    assert asdict(plain) == asdict(Request(WorldKey(2, "gloo", "cpu"), False, 60.0))
    of_mark = RanksMark((3,), backend="shm", fresh=True, timeout=5.0, group=False)
    assert resolved(tmp_path, of_mark) == Request(WorldKey(3, "shm", "cpu", False), True, 5.0)
    of_options = resolved(
        tmp_path, RanksMark((2,)), fresh_worlds=True, world_timeout=7.0, ranks_backend="shm"
    )
    assert of_options == Request(WorldKey(2, "shm", "cpu"), True, 7.0)


def test_features_change_a_request(tmp_path: Path) -> None:
    def sized(parts: dict[str, Any], **_: object) -> int:
        parts["x"] = 1
        return 4

    hooks = Hooks(pytest_ranks_size=sized, pytest_ranks_timeout=9.0, pytest_ranks_spread=(3, 1))
    mark = RanksMark((2,), timeout=5.0)
    request = resolved(tmp_path, mark, hooks)
    assert request == Request(WorldKey(4, "gloo", "cpu", spread=(3, 1)), False, 9.0, {"x": 1})  # type: ignore[arg-type]
    assert hooks.asked["pytest_ranks_request"]["request"] == request
    assert hooks.asked["pytest_ranks_spread"]["key"] == WorldKey(4, "gloo", "cpu")
    fake = Hooks(pytest_ranks_spread=(1,))
    assert resolved(tmp_path, RanksMark((2,), backend="fake"), fake).key.spread == ()
    item = item_of(config_of(tmp_path, hooks=Hooks(pytest_ranks_size=8)))
    assert requests._resolve(item, mark, 1).key.size == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["pytest_ranks_size", "pytest_ranks_spread", "pytest_ranks_request"])
def test_a_feature_may_refuse_a_request(tmp_path: Path, name: str) -> None:
    refusal = Refusal("skipped", "no")
    assert resolved(tmp_path, RanksMark((2,)), Hooks(**{name: refusal})) is refusal


def test_a_test_is_skipped_on_a_backend_that_lacks_its_needs(tmp_path: Path) -> None:
    why = "the test needs that a rank receives what the others have sent, which fake does not offer"
    assert resolved(tmp_path, RanksMark((2,)), ranks_backend="fake") == Refusal("skipped", why)
    for mark in (RanksMark((2,), needs=()), RanksMark((2,), backend="fake")):
        assert isinstance(resolved(tmp_path, mark, ranks_backend="fake"), Request)


def test_a_world_has_ten_thousand_processes_at_most(tmp_path: Path) -> None:
    why = "ranks(10001): 10000 ranks at most under gloo; fake worlds (backend='fake') are larger"
    assert resolved(tmp_path, RanksMark((2,)), Hooks(pytest_ranks_size=10_001)) == Refusal("failed", why)
    assert isinstance(resolved(tmp_path, RanksMark((2,)), Hooks(pytest_ranks_size=10_000)), Request)


def test_ranks_that_need_more_devices_than_there_are_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "count", lambda device: 1)
    lack = "2 ranks under nccl need 2 GPUs, this machine has 1"
    assert resolved(tmp_path, RanksMark((2,), backend="nccl")) == Refusal("skipped", lack)
    assert resolved(tmp_path, RanksMark((2,)), ranks_backend="nccl") == Refusal(
        "skipped", f"{lack}; run with --backend gloo"
    )
    assert isinstance(resolved(tmp_path, RanksMark((1,), backend="nccl")), Request)
    assert isinstance(resolved(tmp_path, RanksMark((2,), backend="gloo"), ranks_device="cuda"), Request)
    spread = Hooks(pytest_ranks_spread=(1, 1))
    assert isinstance(resolved(tmp_path, RanksMark((2,), backend="nccl"), spread), Request)
    why = "the backend nccl does not work with --device cpu"
    assert resolved(tmp_path, RanksMark((1,), backend="nccl"), ranks_device="cpu") == Refusal("skipped", why)


def test_a_refusal_of_a_feature_comes_before_the_mark(tmp_path: Path) -> None:
    item = item_of(config_of(tmp_path))
    item.iter_markers_with_node = lambda name: iter(())
    assert request_of(item) is None
    item.stash[REFUSAL] = refusal = Refusal("skipped", "no")
    assert request_of(item) is refusal


def test_a_wrong_mark_is_refused_as_its_item_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = item_of(config_of(tmp_path, hooks=Hooks()))
    monkeypatch.setattr(requests, "read_mark", lambda item: RanksMark((2,)))
    assert request_of(item) == Request(WorldKey(2, "gloo", "cpu"), False, 60.0)
    assert request_of(item, 1) == Request(WorldKey(1, "gloo", "cpu"), False, 60.0)

    def read(item: object) -> RanksMark:
        raise MarkError("ranks() needs at least one world size")

    monkeypatch.setattr(requests, "read_mark", read)
    assert request_of(item) == Refusal("failed", "ranks() needs at least one world size")
    assert request_of(pytest.DoctestItem.__new__(pytest.DoctestItem)) is None


def test_a_refused_item_is_reported_where_it_is(tmp_path: Path) -> None:
    item = item_of(config_of(tmp_path), location=("test_x.py", 4, "test_y"))
    setup, teardown = report_refusal(item, Refusal("skipped", "no"))
    assert (setup.when, setup.outcome, setup.user_properties) == ("setup", "skipped", [])
    assert setup.longrepr == (str(tmp_path / "test_x.py"), 5, "Skipped: no")
    assert (teardown.when, teardown.outcome, teardown.longrepr) == ("teardown", "passed", None)
    item.location = ("test_x.py", None, "test_y")
    setup, _ = report_refusal(item, Refusal("skipped", "no"))
    assert setup.longrepr == (str(tmp_path / "test_x.py"), 1, "Skipped: no")
    setup, _ = report_refusal(item, Refusal("failed", "no"))
    assert (setup.outcome, setup.longrepr) == ("failed", "no")
    assert setup.user_properties == [("rerun", "pytest test_x.py::test_y")]


def test_the_line_that_runs_an_item_again_repeats_what_changes_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, ranks_backend="shm", world_seed=3, fresh_worlds=True, capture="no")
    config.option.override_ini = ["a=1", "cache_dir=x"]
    config.option.plugins = ["q"]
    config.option.inifilename = "my.ini"
    features = [{"of_feature": 1, "other": False}, {"same": 2}]
    config.hook = Hooks(
        pytest_ranks_command=("python", "-m", "lockstep"),
        pytest_ranks_repeated_options=features,
        pytest_ranks_rerun=["sub/test_x.py::test_y[a b]", "--only"],
    )
    config.option.of_feature, config.option.same = 5, 2
    assert rerun_line(item_of(config, "sub/test_x.py")) == (
        "python -m lockstep 'sub/test_x.py::test_y[a b]' -c my.ini -o a=1 -p q --ranks-backend shm "
        "--world-seed 3 --fresh-worlds --of-feature 5 --capture no --only"
    )
    assert rerun_line(item_of(config_of(tmp_path))) == "pytest test_x.py::test_y"


def test_an_item_of_a_package_runs_again_by_its_name(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.option.inifilename = "my.ini"
    rerun = ["--pyargs", "package.test_x::test_y", "--only"]
    config.hook = Hooks(pytest_ranks_rerun=rerun, pytest_ranks_repeated_options=[])
    assert rerun_line(item_of(config)) == "pytest --pyargs package.test_x::test_y --only"


def grouped(name: str, **options: dict[str, Any]) -> Any:
    """Return a group of options as pytest keeps them."""
    group = argparse.ArgumentParser().add_argument_group(name)
    for option, how in options.items():
        group.add_argument(*how.pop("names", [f"--{option}"]), dest=option, **how)
    return SimpleNamespace(name=name, _arggroup=group)


def test_options_of_others_are_repeated_as_they_were_typed(tmp_path: Path) -> None:
    config = config_of(tmp_path, ranks_device="cpu:0")
    one = {"names": ["--one", "-z"]}
    config._parser._groups = [
        grouped("mine", one=one, flag={"action": "store_true"}, two={"nargs": 2}, some={"nargs": "*"}),
        grouped("mine", maybe={"nargs": "?"}),
        grouped("collect", ignore={}, rootdir={}),
        grouped("ranks", ranks_device={"names": ["--device"]}),
    ]
    typed = "test_x.py --one=1 --ignore a -z2 --flag b --two c d e --some f g --maybe h i --rootdir /r"
    config.invocation_params.args = (*typed.split(), "--one", "3", "--maybe", "--flag", "--", "--one", "4")
    item = item_of(config)
    assert rerun_line(item) == (
        "pytest test_x.py::test_y --device cpu:0 --one=1 -z2 --flag --two c d --some f g --maybe h "
        "--rootdir /r --one 3 --maybe --flag"
    )
    config.invocation_params.args = ()
    assert " --one 3 " in rerun_line(item)
