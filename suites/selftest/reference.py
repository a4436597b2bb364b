"""Makes docs/reference/options.md and names.md: `python -m suites.selftest.reference` in the checkout.

They consist of help texts and docstrings. Docstrings and signatures are read off the source, so that the
pages are the same with every Python and torch.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, cast

import lockstep
from lockstep import hookspecs
from lockstep.conformance import plugin as conformance
from lockstep.features import plugins
from lockstep.options import SHORT, add_long_names, add_options, add_short_options

CHECKOUT = Path(lockstep.__file__).parents[1]
PAGES = CHECKOUT / "docs" / "reference"
PACKAGES = ("", ".engine", ".conformance", ".assertions", ".layouts", ".recorders", ".shm")
COMMANDS = ("doctor", "conformance", "port")
NOTES = """\
`pytest -n`, `-k`, `-x`, `--lf`, `--durations`, `--reruns` and the rest work as anywhere; `-s`,
`--log-cli-level` and `--setup-show` name the rank before each line:
[other plugins, and options of pytest](plugins.md).

With `ranks_at_once` runs share a machine fairly: a world waits until there is room, first come, first served.
Leases are files in `<tmp>/lockstep-<uid>`, or in the directory that LOCKSTEP_LEASES names."""
MADE = "<!-- Made by `python -m suites.selftest.reference`, of help texts and docstrings. -->\n\n"


class Recorder:
    """A parser of options, or a group of it: notes what is added to it."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.ini: list[str] = []

    def getgroup(self, *names: str) -> Recorder:
        return self

    def addoption(self, *names: str, **attributes: Any) -> None:
        action = argparse.ArgumentParser(add_help=False).add_argument(*names, **attributes)
        self.rows.append(row_of(action))

    def addini(self, name: str, help: str, type: str = "string", default: object = None) -> None:
        shown = "" if default in (None, []) else f" (default: {default})"
        self.ini.append(f"| `{name}` | {type} | {escaped(help)}{escaped(shown)} |")


def row_of(action: argparse.Action) -> str:
    """Return the row of an option: its names with its values, and its help."""
    values = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    if not values and action.nargs != 0:
        values = (action.option_strings or [action.dest])[-1].rpartition("-")[2].upper()
    words = str(action.help or "").replace("%(default)s", str(action.default))
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    shown = f"{names} {values}".strip() if action.option_strings else names
    return f"| `{shown.replace('|', ',')}` | {escaped(words)} |"


def escaped(text: str) -> str:
    """Escape what Markdown would read as a tag or as the end of a cell."""
    return text.replace("<", "&lt;").replace("|", "\\|")


def options_page() -> str:
    """Return the page of options, ini options, marks, fixtures, hooks and commands."""
    general, engines = Recorder(), Recorder()
    add_options(cast(Any, general))
    for plugin in plugins():
        getattr(plugin, "pytest_addoption", lambda parser: None)(cast(Any, general))
    short = [getattr(plugin, "pytest_ranks_short_options", dict)() for plugin in plugins()]
    for options in short:
        add_long_names(cast(Any, general), options)
    for options in (SHORT, *short):
        add_short_options(cast(Any, general), options, ())
    conformance.pytest_addoption(cast(Any, engines))
    option, ini = "| option | |\n|---|---|\n", "| ini option | type | |\n|---|---|---|\n"
    parts = [
        MADE + "# Options, marks, fixtures, hooks, commands",
        "## Options of pytest",
        option + "\n".join(general.rows),
        "With the plugin `lockstep.conformance.plugin`:",
        option + "\n".join(engines.rows),
        "## Ini options",
        ini + "\n".join(general.ini),
        NOTES,
        "## Marks",
        *marks("lockstep.plugin"),
        *(text for plugin in plugins() for text in marks(plugin.__name__)),
        "## Fixtures",
        *fixtures("lockstep.fixtures"),
        *(text for plugin in plugins() for text in fixtures(plugin.__name__)),
        "With the plugin `lockstep.conformance.plugin`:",
        *fixtures("lockstep.conformance.plugin"),
        "## Hooks",
        *(documented(node) for node in functions(hookspecs.__name__)),
        "## Commands",
        *(text for name in COMMANDS for text in command(name)),
    ]
    return "\n\n".join(parts) + "\n"


def command(name: str) -> Iterator[str]:
    """Yield what there is to say of a command of `python -m lockstep`."""
    top = argparse.ArgumentParser(prog="python -m lockstep").add_subparsers()
    importlib.import_module(f"lockstep.{name}.command").add_to(top)
    parser = cast(argparse.ArgumentParser, top.choices[name])
    yield f"### python -m lockstep {name}"
    yield escaped(parser.description or "")
    rows = [row_of(action) for action in parser._actions if action.dest != "help"]
    yield "| argument | |\n|---|---|\n" + "\n".join(rows)


def marks(module: str) -> Iterator[str]:
    for node in ast.walk(source(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config.addinivalue_line":
            mark, _, what = str(ast.literal_eval(node.args[1])).partition(":")
            yield f"`{mark}`:{escaped(what)}"


def fixtures(module: str) -> Iterator[str]:
    for node in functions(module):
        if any("fixture" in ast.unparse(each) for each in node.decorator_list):
            yield f"`{node.name}`: {as_markdown(ast.get_docstring(node))}"


def functions(module: str) -> list[ast.FunctionDef]:
    return [node for node in source(module).body if isinstance(node, ast.FunctionDef)]


def source(module: str) -> ast.Module:
    return ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())


def names_page() -> str:
    """Return the page of public names."""
    parts = [MADE + "# Public names"]
    for package in PACKAGES:
        module = importlib.import_module(f"lockstep{package}")
        parts += [f"## lockstep{package}", str(module.__doc__).partition("\n")[0]]
        for name in module.__all__:
            parts += [f"### {name}", *public(module.__name__, name, getattr(module, name))]
    return "\n\n".join(parts) + "\n"


def public(package: str, name: str, found: Any) -> Iterator[str]:
    """Yield what there is to say of a public name."""
    home = getattr(found, "__module__", "")
    if not inspect.isclass(found) and not inspect.isfunction(found):
        yield value(package, name)
        return
    if not home.startswith("lockstep"):
        yield f"PyTorch's `{home}.{found.__qualname__}`."
        return
    nodes = (node for node in source(home).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    node = next(node for node in nodes if node.name == found.__name__)
    if isinstance(node, ast.FunctionDef):
        yield documented(node, heading=False)
        return
    init = next((each for each in methods(node) if each.name == "__init__"), None)
    if init is not None:
        yield f"```text\n{signature(init).replace('__init__', name, 1)}\n```"
    yield as_markdown(ast.get_docstring(node))
    if init is not None and ast.get_docstring(init):
        yield as_markdown(ast.get_docstring(init))
    if members := [*values_of(node, is_enum=issubclass(found, Enum)), *methods_of(node)]:
        yield "\n".join(members)


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def methods_of(node: ast.ClassDef) -> Iterator[str]:
    for method in methods(node):
        if not method.name.startswith("_") and (text := ast.get_docstring(method)):
            is_property = any("property" in ast.unparse(each) for each in method.decorator_list)
            shown = method.name if is_property else signature(method)
            yield f"* `{one_line(shown)}`: {escaped(one_line(text.partition(chr(10) * 2)[0]))}"


def values_of(node: ast.ClassDef, is_enum: bool) -> Iterator[str]:
    """Yield the fields of a dataclass, and the members of an enumeration, with the docstrings below them."""
    for each, below in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        target = each.target if isinstance(each, ast.AnnAssign) else None
        if is_enum and isinstance(each, ast.Assign):
            target = each.targets[0]
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            text = docstring_below(below)
            yield f"* `{one_line(ast.unparse(each))}`{': ' if text else ''}{escaped(one_line(text))}"


def docstring_below(node: ast.AST) -> str:
    constant = node.value if isinstance(node, ast.Expr) else None
    return str(constant.value) if isinstance(constant, ast.Constant) else ""


def value(package: str, name: str) -> str:
    """Return a public name that is neither a class nor a function, with the docstring below it."""
    modules = [module for module in sys.modules if module.startswith(package) and sys.modules[module]]
    for module in sorted(modules):
        body = source(module).body if getattr(sys.modules[module], "__file__", None) else []
        for each, below in zip(body, [*body[1:], ast.Pass()], strict=True):
            targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return f"```text\n{ast.unparse(each)}\n```\n\n{as_markdown(docstring_below(below))}".rstrip()
    raise LookupError(f"{package} has no assignment to {name}")


def documented(node: ast.FunctionDef, heading: bool = True) -> str:
    title = f"### {node.name}\n\n" if heading else ""
    return f"{title}```text\n{signature(node)}\n```\n\n{as_markdown(ast.get_docstring(node))}"


def signature(node: ast.FunctionDef) -> str:
    """Return a function's head, on one line if it fits there."""
    arguments = [each for each in ast.unparse(node.args).split(", ") if each != "self"]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{node.name}({', '.join(arguments)}){returns}"


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def as_markdown(docstring: str | None) -> str:
    """Return a docstring whose sections are lists.

    Raises:
        ValueError: there is none.
    """
    if not docstring:
        raise ValueError("something public has no docstring")
    section, made = "", []
    for line in inspect.cleandoc(docstring).splitlines():
        if found := re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            section = found[1]
            made += [f"{section}:", ""]
        elif section and line.startswith("    "):
            entry = re.match(r"    (?! )([\w*., ]+): (.*)", line)
            if entry and section not in ("Returns", "Yields"):
                made.append(f"* `{entry[1]}`: {escaped(entry[2])}")
            else:
                made.append(f"  {escaped(line.strip())}")
        else:
            section = section if not line else ""
            made.append(line if line.startswith("    ") else escaped(line))
    return "\n".join(made)


def main() -> None:
    for name, text in (("options", options_page()), ("names", names_page())):
        (PAGES / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
