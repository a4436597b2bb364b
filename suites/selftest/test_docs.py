"""The pages under docs: their examples run, and the tests they name exist."""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp._fully_shard import _fully_shard as composable
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import engine
from lockstep.engine import FullyShardedDataParallel, MixedPrecision
from suites.selftest.pictures import LEFT_OUT, MOST, coloured

THEIRS = (composable.fully_shard, replicate_with_fsdp.replicate)
PROJECT = Path(__file__).parents[2]
OF_ENGINES = Path(__file__).parent / "conformance"
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"), key=str)
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Tests in examples are run as tests, by test_docs_sessions.py.
WITH_EXAMPLES = [
    page for page in PAGES if EXAMPLE.search(page.read_text()) and "\ndef test_" not in page.read_text()
]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

OF_A_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

# `suite/test_file.py::TestClass::test_name`, in a folder of the suite or without a class, too.
NAMED_TEST = re.compile(r"`(\w+(?:/\w+)*/test_\w+\.py)::([\w:]+)`")


def names_of_tests(path):
    """Return the names of a file's tests, those of a class behind the class's."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + one.name for one in inside if isinstance(one, ast.FunctionDef)}
    return names


def listed(entries):
    """Yield the pages of a part of the site's navigation, in order."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values():
                yield from listed([part] if isinstance(part, str) else part)


def test_the_site_lists_each_page_once():
    nav = tomllib.loads((PROJECT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(listed(nav)) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_every_link_of_the_readme_leads_to_a_page_or_drawing():
    links = re.findall(r'(?:\]\(|src=")(?!https://)([^)"#]+)[^)"]*[)"]', (PROJECT / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (PROJECT / link).is_file()] == []


def test_pictures_are_small_and_each_is_on_a_page():
    pictures = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    text = "".join(page.read_text() for page in PAGES)
    assert {name for name in pictures if f"(images/{name})" in text or f"(../images/{name})" in text} == {
        *pictures
    }
    assert 0 < max(pictures.values()) <= MOST


def test_a_picture_of_a_terminal_has_its_colours_and_no_stacks():
    report = "MainThread:\n  File 'x'\n--- timeline: \x1b[1m\x1b[31ma<b\x1b[39;49;00m c\x1b[0m"
    bold = '<span style="font-weight: bold; color: #ff7b72">'
    shown = coloured(LEFT_OUT.sub("...\n", report))
    assert shown == f"...\n--- timeline: {bold}a&lt;b</span> c"


SITE = {
    "index.html": """
        <a href="a/b.html#here">right</a> <a href="https://pytorch.org">right</a> <a href="#own">right</a>
        <a id="own" href="a/c.html">1</a> <a href="a/b.html#there">2</a> <a href="http://pytorch.org">3</a>
        <img src="a/none.svg"> <script src="https://pytorch.org/x.js"></script> <a href="../outside">6</a>
        <a href="#none">7</a>""",
    "a/b.html": '<h1 id="here">right</h1> <a href="../index.html">right</a> <a href="..">right</a>',
}


def test_every_kind_of_wrong_link_is_found_in_a_site(tmp_path):
    (tmp_path / "a").mkdir()
    for name, text in SITE.items():
        (tmp_path / name).write_text(text)
    checker = [sys.executable, str(PROJECT / ".ci" / "check_site.py"), str(tmp_path)]
    done = subprocess.run(checker, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "index.html:3: 'a/c.html' leads to no file of the site",
        "index.html:3: 'a/b.html#there' names an anchor that its page does not have",
        "index.html:3: 'http://pytorch.org' is no https link",
        "index.html:4: 'a/none.svg' leads to no file of the site",
        "index.html:4: 'https://pytorch.org/x.js' is loaded from elsewhere",
        "index.html:4: '../outside' leads to no file of the site",
        "index.html:5: '#none' names an anchor that its page does not have",
    ]
    (tmp_path / "index.html").unlink()
    (tmp_path / "a" / "b.html").write_text("<p>none</p>")
    assert subprocess.run(checker, check=False).returncode == 0


def test_markdown_of_the_project_is_its_readme_and_pages():
    assert [path.name for path in PROJECT.glob("*.md")] == ["README.md"]


@EVERY_PAGE
def test_every_test_that_a_page_names_exists(page):
    text, suites = OF_A_BLOCK.sub("", page.read_text()), PROJECT / "suites"
    named = NAMED_TEST.findall(text)
    assert len(named) == text.count(".py::")
    assert [f"{file}::{name}" for file, name in named if name not in names_of_tests(suites / file)] == []


def test_every_file_that_the_map_names_exists():
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    roots = [PROJECT, PROJECT / "harness", PROJECT / "harness" / "engine", PROJECT / "harness" / "reporting"]
    roots += [PROJECT / "suites" / "selftest"]
    assert len(named) > 50
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_the_table_of_faults_has_those_of_its_benchmark():
    benchmark = (PROJECT / "benchmarks" / "faults.py").read_text()
    page, _, _ = (DOCS / "reference" / "faults.md").read_text().partition("## How faults are detected")
    rows = re.findall(r"^\| (.*?) +\|", page, re.MULTILINE)[2:]
    names = [name.split(" (deadline")[0] for name in re.findall(r'Fault\(\s+f?"(.*)",', benchmark)]
    assert [row.split(" (deadline")[0] for row in rows] == names


def test_the_engines_of_the_page_are_those_that_are_tested():
    first, _, last = EXAMPLE.findall((DOCS / "how_to" / "your_engine.md").read_text())
    assert first == (OF_ENGINES / "sample_engine.py").read_text()
    assert last == (OF_ENGINES / "zero1_engine.py").read_text()


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
@pytest.mark.ranks(1, 2, 3, backend="gloo")
def test_the_examples_of_a_page_run(world, page, monkeypatch):
    # What is freed is to be seen freed.
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    monkeypatch.syspath_prepend(OF_ENGINES)  # the second engine of a page imports the first
    blocks = EXAMPLE.findall(page.read_text())
    exec(compile("\n".join(blocks), page.name, "exec"), {})


def of_torchs_composable_fronts():
    """Return the names of torch's functions, classes, methods and arguments."""
    methods = [name for name in dir(torch.distributed.fsdp.FSDPModule) if not name.startswith("_")]
    arguments = [name for front in THEIRS for name in signature(front).parameters]
    return {*methods, *arguments, *composable.__all__, "DataParallelMeshDims"}


def not_built():
    """Return which of those names a row of the page says to be not built."""
    page = (DOCS / "reference" / "composable.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if "| not built" in row]
    return set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_every_name_of_torchs_composable_fronts_has_its_row():
    page = (DOCS / "reference" / "composable.md").read_text()
    assert {name for name in of_torchs_composable_fronts() if f"`{name}`" not in page} == set()


def test_the_page_lists_all_that_is_not_built():
    arguments = {
        name for front in (engine.fully_shard, engine.replicate) for name in signature(front).parameters
    }
    here = arguments.union(dir(engine.FSDPModule), engine.__all__)
    missing = of_torchs_composable_fronts() - here
    assert missing <= not_built()
    assert not_built() & here == set()


def test_methods_of_composable_fronts_have_the_torch_signatures():
    shared = of_torchs_composable_fronts() & vars(engine.FSDPModule).keys()
    assert {"unshard", "reshard"} <= shared
    for name in shared:
        mine, theirs = (
            [(p.name, p.kind, p.default) for p in signature(getattr(cls, name)).parameters.values()]
            for cls in (engine.FSDPModule, torch.distributed.fsdp.FSDPModule)
        )
        assert mine == theirs, name


class Exchanges(TorchDispatchMode):
    """Note whenever ranks exchange something what tensors occupy, by dtype, in bytes per parameter."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.seen = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall" in func.__name__:
            self.seen.append(self.occupied())
        return func(*args, **(kwargs or {}))

    def occupied(self):
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        storages = {t.untyped_storage().data_ptr(): (t.dtype, t.untyped_storage().nbytes()) for t in tensors}
        large = [(dtype, nbytes / self.numel) for dtype, nbytes in storages.values() if nbytes >= self.numel]
        return {dtype: sorted(n for kind, n in large if kind == dtype) for dtype, _ in large}


@pytest.mark.ranks(2, backend="gloo")
def test_memory_of_a_mixed_precision_step_is_as_the_page_shows(world, monkeypatch):
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    f32, bf16 = torch.float32, torch.bfloat16
    precision = MixedPrecision(param_dtype=bf16, reduce_dtype=f32)
    model = FullyShardedDataParallel(nn.Linear(256, 256, bias=False), mixed_precision=precision)
    gc.collect()
    with Exchanges(256 * 256) as log:
        model(torch.ones(1, 256)).sum().backward()
    gather, reduction = {f32: [2], bf16: [1, 2]}, {f32: [2, 4, 4]}  # 4/W, 2/W + 2; 4/W + 8
    assert log.seen == [gather, gather, reduction]
