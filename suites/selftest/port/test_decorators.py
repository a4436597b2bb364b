"""Decorators, classes and whole files that `python -m lockstep port` converts, and what it leaves."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from lockstep.port.module import port
from suites.selftest.port.test_constructs import HEAD, method, statement
from suites.selftest.project import PROJECTS


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@unittest.skip", "@pytest.mark.skip"),
        ("@unittest.skip('why')", "@pytest.mark.skip(reason='why')"),
        ("@skip_but_pass_in_sandcastle('why')", "@pytest.mark.skip(reason='why')"),
        ("@unittest.skipIf(A, 'why')", "@pytest.mark.skipif(A, reason='why')"),
        ("@unittest.skipUnless(A or B, 'why')", "@pytest.mark.skipif(not (A or B), reason='why')"),
        ("@skip_but_pass_in_sandcastle_if(A, 'why')", "@pytest.mark.skipif(A, reason='why')"),
        ("@unittest.expectedFailure", "@pytest.mark.xfail(strict=True)"),
        (
            "@skip_if_lt_x_gpu(2)",
            '@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs 2 accelerators")',
        ),
        (
            "@skip_if_lt_x_gpu(2, allow_cpu=True)",
            "@pytest.mark.skipif(0 < torch.accelerator.device_count() < 2, "
            'reason="needs 2 accelerators, or none")',
        ),
        *(
            (
                decorator,
                '@pytest.mark.skipif(x == "nccl" and torch.cuda.device_count() < 2, reason="needs 2 GPUs")',
            )
            for decorator in ("@require_n_gpus_for_nccl_backend(2, x)", "@nccl_skip_if_lt_x_gpu(x, 2)")
        ),
        (
            "@requires_nccl_version((2, 10), 'why')",
            "@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 10), "
            "reason='why')",
        ),
        ("@parametrize('x', [1, 2])", "@pytest.mark.parametrize('x', [1, 2])"),
        ("@parametrize('x', [1], name_fn=str)", "@pytest.mark.parametrize('x', [1], ids=str)"),
        (
            "@parametrize('x,y', [subtest((1, 2), name='a')])",
            "@pytest.mark.parametrize('x,y', [pytest.param(1, 2, id='a')])",
        ),
        (
            "@parametrize('x', [subtest((1, 2), name='a')])",
            "@pytest.mark.parametrize('x', [pytest.param((1, 2), id='a')])",
        ),
        (
            "@parametrize('x', [1, subtest(2, name='two')])",
            "@pytest.mark.parametrize('x', [1, pytest.param(2, id='two')])",
        ),
        ("@mock.patch('os.getcwd')", "@mock.patch('os.getcwd')"),
    ],
)
def test_a_decorator_becomes(before: str, after: str) -> None:
    assert method("pass", decorators=f"{before}\n").splitlines()[0] == after


def test_a_test_with_a_world_size_of_its_own_has_a_mark_of_its_own() -> None:
    lines = method("pass", decorators="@requires_world_size(3)\n").splitlines()
    assert lines[:2] == [
        '@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs 3 GPUs")',
        "@pytest.mark.ranks(3)",
    ]


@pytest.mark.parametrize(
    ("decorator", "why"),
    [
        ("@strange", "the decorator strange"),
        ("@unittest.expectedFailure()", "the decorator expectedFailure"),
        ("@unittest.skip(*x)", "skip with arguments of another form"),
        ("@unittest.skipIf(reason='why', condition=x)", "skipIf with arguments of another form"),
        ("@skip_if_lt_x_gpu(x=2)", "skip_if_lt_x_gpu with arguments by name"),
        ("@nccl_skip_if_lt_x_gpu(backend=x, x=2)", "the number of GPUs for nccl, by name"),
        ("@requires_nccl_version(version=1, msg=x)", "requires_nccl_version with arguments by name"),
        ("@requires_world_size(n=3)", "requires_world_size with other arguments than one"),
        ("@with_comms(backend=x)", "with_comms with a backend that a world may not have"),
        ("@parametrize('x')", "parametrize with arguments of another form"),
        ("@parametrize(arg='x', values=[1])", "parametrize with arguments by name"),
        ("@parametrize('x', [subtest(1, decorators=[x])])", "a subtest with decorators"),
        ("@parametrize('x,y', [subtest(x)])", "a subtest with values that are not listed here"),
        ("@parametrize(x, [subtest(1)])", "parametrize with subtests that are not listed here"),
    ],
)
def test_an_unknown_decorator_stays_with_a_comment(decorator: str, why: str) -> None:
    lines = method("pass", decorators=f"{decorator}\n").splitlines()
    assert lines[:2] == [f"# lockstep: not converted: {why}", decorator]


def test_a_function_of_names_is_dropped_where_it_takes_several_values() -> None:
    lines = method("pass", decorators="@parametrize('x,y', [(1, 2)], name_fn=str)\n").splitlines()
    why = "name_fn, dropped: it takes several values, pytest's ids take one"
    assert lines[:2] == [f"# lockstep: not converted: {why}", "@pytest.mark.parametrize('x,y', [(1, 2)])"]


def test_a_group_of_a_decorator_is_of_its_backend() -> None:
    decorators = {
        "gloo": "@with_comms(backend='gloo')",
        "nccl": "@with_comms(eager_init=True, backend='nccl')",
    }
    tests = "".join(
        f"    {decorator}\n    def test_{name}(self):\n        {name}()\n\n"
        for name, decorator in decorators.items()
    )
    converted = port(HEAD + tests).code
    for name in decorators:
        assert f'@pytest.mark.ranks(4, backend="{name}")\n    def test_{name}(self):\n' in converted
    assert "with_comms" not in converted[converted.index("class TestOne") :]


def test_a_directory_is_shared_where_a_group_was_up_and_else_left() -> None:
    base = HEAD.replace("(MultiProcessTestCase)", "(FSDPTest)").replace(
        "import check_sharded_parity", "import check_sharded_parity, FSDPTest"
    )
    imports = "from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir\n"
    test = "    @with_temp_dir\n    def test_one(self):\n        return self.temp_dir\n"
    assert "        return str(world.shared_tmp_path)\n" in port(imports + base + test).code
    left = port(imports + HEAD + test)
    assert "    @with_temp_dir\n    def test_one(self):\n" in left.code
    assert left.notes[0].endswith("where no group is up: each rank had a directory of its own")


def test_self_of_another_class_is_left_alone() -> None:
    code = """
        class Model(torch.nn.Module):
            def forward(self, x):
                return x + self.rank
        return Model, self.rank"""
    assert "return x + self.rank" in statement(code)
    assert "return Model, world.rank" in statement(code)


def test_a_helper_finds_the_world_on_self() -> None:
    helper = "    def help(self):\n        return self.rank\n"
    converted = port(f"{HEAD}    def test_one(self):\n        self.help()\n\n{helper}").code
    assert "def test_one(self):" in converted
    assert "return self.world.rank" in converted
    assert "def _on_ranks(self, world):\n        self.world = world" in converted


def test_a_test_that_binds_the_name_world_finds_the_fixture_on_self() -> None:
    assert method("world = self.world_size").endswith("    world = self.world.size")


def test_functions_of_torch_get_a_test_case_or_none() -> None:
    assert statement("run_subtests(self, {'a': x}, y)") == "run_subtests({'a': x}, y)"
    assert statement("check_sharded_parity(self, x, y)") == "check_sharded_parity(TestCase(), x, y)"


def test_a_group_of_its_own_goes_and_a_store_stays_where_it_is_used() -> None:
    code = """
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend="gloo", store=store, rank=self.rank, world_size=self.world_size)
        store.set("a", "b")
        dist.destroy_process_group()"""
    after = """\
        store = dist.FileStore(str(world.shared_tmp_path / "store"), world.size)
        store.set("a", "b")"""
    assert statement(code) == textwrap.dedent(after)


def test_backends_that_differ_stand_on_the_tests() -> None:
    tests = "".join(
        f"    def test_{name}(self):\n        dist.init_process_group('{name}')\n        {name}()\n\n"
        for name in ("gloo", "nccl")
    )
    converted = port(HEAD + tests).code
    assert "@pytest.mark.ranks(4)\nclass TestOne:" in converted
    assert '@pytest.mark.ranks(4, backend="gloo")\n    def test_gloo(self):\n        gloo()' in converted
    assert '@pytest.mark.ranks(4, backend="nccl")\n    def test_nccl(self):\n        nccl()' in converted


def test_what_is_left_is_commented_and_counted() -> None:
    text = (PROJECTS / "port" / "test_left.py").read_text()
    ported = port(text)
    assert (ported.whole, ported.commented, ported.left) == (1, 5, 4)
    comments = [line.strip() for line in ported.code.splitlines() if "lockstep:" in line]
    assert comments == [
        "# lockstep: not converted: its ranks are threads of one process",
        "# lockstep: not converted: it is derived from Mixin, which this file does not define",
        "# lockstep: not converted: its _run is part of a launcher of its own",
        "# lockstep: not converted: LauncherTest, of the same family, is left: "
        "its _run is part of a launcher of its own",
        "# lockstep: not converted: assertExpectedInline has no counterpart here",
        "# lockstep: not converted: `self` is passed on, perhaps as a test case",
        "# lockstep: not converted: the decorator elsewhere.decorator",
        "# lockstep: not converted: init_process_group with timeout",
        "# lockstep: not converted: assertTrue inside an expression",
        "# lockstep: not converted: self.file_name is of the class MultiProcessTestCase",
    ]
    assert "# the text stays\n" in ported.code
    plain = "class PlainTest(TestCase):\n    def test_nothing_of_ranks(self):\n        self.assertEqual(1, 1)"
    assert plain in ported.code
    assert ported.code.endswith('if __name__ == "__main__":\n    run_tests()\n')


def test_deepspeeds_tests_take_its_sizes_and_the_directory_of_all_ranks() -> None:
    ported = port((PROJECTS / "port" / "test_deepspeed.py").read_text())
    assert (ported.whole, ported.commented, ported.left) == (3, 0, 1)
    assert (
        '@pytest.mark.usefixtures("deepspeed_comm")\n@pytest.mark.ranks(1, 2, fresh=True)\nclass TestSizes:'
        in ported.code
    )
    assert (
        '@pytest.mark.ranks(4, fresh=True)\n    def test_own_size(self, number, world, color="red"):'
        in ported.code
    )
    assert 'assert int(os.environ["WORLD_SIZE"]) == world.size' in ported.code
    assert "def test_directory(self, number, world):" in ported.code
    assert 'open(os.path.join(world.shared_tmp_path, "shared"), "a")' in ported.code
    assert "deepspeed.init_distributed(dist_backend=world.backend)" in ported.code


@pytest.mark.parametrize("name", ["test_launched", "test_left", "test_deepspeed"])
def test_a_second_run_changes_nothing(name: str) -> None:
    once = port((PROJECTS / "port" / f"{name}.py").read_text())
    twice = port(once.code)
    assert twice.code == once.code
    assert twice.whole == twice.commented == 0


def test_a_file_without_such_classes_stays_as_it_is() -> None:
    text = Path(__file__).read_text()
    assert port(text).code == text
