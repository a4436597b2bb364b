"""The verdicts of a session over adopted classes, read from its XML report."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

from suites.selftest.project import Project


def verdicts_of(project: Project, *args: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Run pytest in a project; return its verdict on each `Class.test`: a word, and why it did not pass.

    A tear-down that fails too is a verdict of its own, under the same name with " (again)".
    """
    report = project.path / "report.xml"
    project.run(f"--junitxml={report}", *args, environ=dict(environ or {}))
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].split('.')[-1]}.{case.attrib['name']}"
        said = [child for child in case if child.tag in ("failure", "error", "skipped")]
        words = [f"{child.tag}: {child.get('message', '').partition(chr(10))[0]}" for child in said]
        # torch 2.15 counts accelerators where older ones count CUDA devices.
        said_in_full = "; ".join(words).replace("accelerator devices", "CUDA devices")
        found[name if name not in found else f"{name} (again)"] = said_in_full or "passed"
    return found


def of_class(verdicts: dict[str, str], name: str) -> dict[str, str]:
    """Return the verdicts on the tests of a class, by their names in it."""
    return {key.split(".")[1]: said for key, said in verdicts.items() if key.split(".")[0] == name}
