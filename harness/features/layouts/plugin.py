"""The plugin of layouts: an item for each layout of a mark, and the fixture `layout` in its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from lockstep.features.layouts.mark import FAKE, MarkError, parse_mark
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.options import default_backend
from lockstep.rank_session import session_of

if TYPE_CHECKING:
    from lockstep.layouts import Layout

_has_layouts: pytest.StashKey[bool] = pytest.StashKey()
_REMEDY = "mark the test with pytest.mark.layouts(dp=(1, 2), tp=(1, 2))"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption(
        "--layouts",
        metavar="GLOBS",
        help="run only these layouts of the mark `layouts`, such as 'tp2*', or several behind commas",
    )
    group.addoption(
        "--all-layouts",
        action="store_true",
        help="run layouts that contain one that failed, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "layouts(at_most=8, both_orders=False, **axes): run the test on every layout of axes such as "
        "dp=(1, 2), tp=(1, 2), one item each, of as many ranks as it has, at most `at_most`; in both orders, "
        "to see what one layout leaves to the next. Options of the mark `ranks` are options here, too.",
    )
    if not config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.layouts.controller import Layouts

        config.pluginmanager.register(Layouts(config))


def pytest_ranks_mentioned(config: pytest.Config, text: bytes) -> bool:
    """Return whether a file may have the mark."""
    config.stash[_has_layouts] = config.stash.get(_has_layouts, False) or b"mark.layouts" in text
    return config.stash[_has_layouts]


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    if config.stash.get(_has_layouts, False):
        hints += ["lockstep.layouts", "torch._dynamo"]  # by the first optimizer step; seconds in each rank


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make an item of each layout, on as many ranks as it has."""
    definition = metafunc.definition
    mark = definition.get_closest_marker("layouts")
    if mark is None:
        if _uses_layout(metafunc):
            raise _refusal(metafunc, f"the fixture `layout` exists only in layouts: {_REMEDY}")
        return
    if any(each.name == "ranks" for each in definition.own_markers):
        raise _refusal(
            metafunc, "layouts: a layout says on how many ranks the test runs; remove the mark `ranks`"
        )
    try:
        added = [name for each in metafunc.config.hook.pytest_ranks_mark_options() for name in each]
        options = dict(mark.kwargs)
        if default_backend(metafunc.config) == FAKE and options.get("needs") == ():
            options.setdefault("backend", FAKE)  # so that each layout is one item
        wanted = parse_mark(mark.args, options, added)
    except MarkError as error:
        raise _refusal(metafunc, str(error)) from None
    if "layout" not in metafunc.fixturenames:
        metafunc.fixturenames.append("layout")
    sizes = [
        pytest.param(each, id=each.name, marks=pytest.mark.ranks(each.ranks, **wanted.of_ranks))
        for each in wanted.layouts
    ]
    metafunc.parametrize("layout", sizes, indirect=True)
    definition.add_marker(pytest.mark.ranks(wanted.layouts[0].ranks, **wanted.of_ranks))


def _uses_layout(metafunc: pytest.Metafunc) -> bool:
    """Return whether a test requests our fixture `layout`, and not one of its own project."""
    from lockstep.controller.pytest_internals import fixture_function

    if "layout" not in metafunc.fixturenames:
        return False
    function = fixture_function(metafunc, "layout")
    return getattr(function, "__module__", "") == __name__


def _refusal(metafunc: pytest.Metafunc, why: str) -> BaseException:
    return pytest.fail.Exception(f"{metafunc.definition.nodeid}: {why}", pytrace=False)


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Iterator[Layout]:
    """The layout of this item: sizes, coordinates, the mesh of its axes, groups, parts of tensors."""
    session = session_of(request)
    from lockstep.layouts import Layout

    world = session.world
    hosts = world.gather(world.host) if len(world.hosts) > 1 else ()
    with Layout(dict(request.param.of_axes), world.device.type, hosts) as made:
        yield made
