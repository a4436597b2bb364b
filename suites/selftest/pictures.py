"""Makes the pictures of docs/images: `python -m suites.selftest.pictures` in the checkout; it needs Chromium.

Each is of a run of its own, in a folder called `project`, of files that pages show or that self-tests use.
`python -m suites.selftest.pictures failure hang` makes some. They show seconds: make them on a quiet machine.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path

from suites.selftest.browser import Browser, find_browser, start_browser
from suites.selftest.project import PROJECTS, printed_by

CHECKOUT = Path(__file__).parents[2]
IMAGES = CHECKOUT / "docs" / "images"
MOST = 150_000
"""Bytes of a picture."""
SCALE = 2
"""Pixels of a picture for each of CSS, as sharp screens have."""
MARGIN = 16
"""Pixels of CSS below the last element of a picture."""

Pictures = dict[str, bytes]
"""Pictures by name, as PNG."""


def main(names: list[str]) -> None:
    """Make all pictures, or those of some functions of MAKERS."""
    program = find_browser()
    if program is None:
        sys.exit("no Chromium on the PATH, nor named by LOCKSTEP_BROWSER")
    for maker in MAKERS:
        if names and maker.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory() as above, start_browser(program) as browser:
            folder = Path(above) / "project"
            folder.mkdir()
            (folder / "pytest.ini").write_text("[pytest]\n")
            for name, picture in maker(folder, browser).items():
                write(name, picture)


def write(name: str, picture: bytes) -> None:
    """Write a picture in its most frequent colours: text and plain areas have few."""
    import numpy as np
    from PIL import Image  # comes with torchvision

    whole = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=np.int32)
    codes, places, counts = np.unique(
        whole @ np.array([1 << 16, 1 << 8, 1]), return_inverse=True, return_counts=True
    )
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], 1)
    kept = colours[np.argsort(counts)[-160:]]
    nearest = np.square(colours[:, None] - kept).sum(2).argmin(1)
    few = Image.fromarray(nearest[places].reshape(whole.shape[:2]).astype(np.uint8), "P")
    few.putpalette(kept.astype(np.uint8).tobytes())
    file = io.BytesIO()
    few.save(file, "PNG", optimize=True)
    if file.tell() > MOST:
        sys.exit(f"{name} has {file.tell():,} bytes, more than {MOST:,}")
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"{name}.png"
    path.write_bytes(file.getvalue())
    sys.stdout.write(f"{path.relative_to(CHECKOUT)}: {few.width} x {few.height}, {file.tell():,} bytes\n")


# Terminals

SGR = re.compile(r"\x1b\[([\d;]*)m")
"""Escape sequence that sets colours."""
LEFT_OUT = re.compile(
    r"^MainThread:\n.*?(?=^-+ timeline)"  # stacks, which have the paths of this machine
    r"|^\S*=+ short test summary info .*(?=^[^\n])",  # all but the last line
    re.MULTILINE | re.DOTALL,
)
COLOURS = {
    "1": "#ff7b72",
    "2": "#56d364",
    "3": "#e3b341",
    "4": "#79c0ff",
    "5": "#d2a8ff",
    "6": "#39c5cf",
    "7": "#e6edf3",
}
"""Red, green, yellow, blue, magenta, cyan, white; by the last digit of their codes."""
TERMINAL = """\
<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #0d1117; }
pre { display: inline-block; margin: 0; padding: 14px 18px; color: #e6edf3; }
pre { font: 13px/1.4 "DejaVu Sans Mono", ui-monospace, monospace; }
</style>
<pre>"""


def terminal(folder: Path, browser: Browser, test: str, page: str, columns: int) -> bytes:
    """Return the picture of a terminal in which pytest has run a file that a page shows."""
    pattern = rf'^```python title="{re.escape(test)}"\n(.*?)^```'
    (text,) = re.findall(pattern, (CHECKOUT / page).read_text(), re.MULTILINE | re.DOTALL)
    (folder / test).write_text(text)
    output = LEFT_OUT.sub("...\n", printed_by(folder, "pytest", "-q", "--color=yes", test, columns=columns))
    path = folder / "terminal.html"
    path.write_text(f"{TERMINAL}<b>$ pytest -q {test}</b>\n{coloured(output.rstrip())}</pre>")
    browser.open(path)
    (box,) = browser.boxes("pre")
    browser.resize(round(box.right), 700, SCALE)
    return browser.picture(0, box.bottom)


def coloured(text: str) -> str:
    """Return text with escape sequences as HTML."""
    parts = []
    style: dict[str, str] = {}
    for number, part in enumerate(SGR.split(text)):
        if number % 2 == 0:
            shown = escape(part)
            parts.append(
                f'<span style="{"; ".join(style.values())}">{shown}</span>' if style and part else shown
            )
            continue
        for code in part.split(";"):
            if not code.strip("0"):
                style = {}
            elif code == "1":
                style["weight"] = "font-weight: bold"
            elif code == "39":
                style.pop("colour", None)
            elif code[0] in "39" and code[-1] in COLOURS:
                style["colour"] = f"color: {COLOURS[code[-1]]}"
    return "".join(parts)


def failure(folder: Path, browser: Browser) -> Pictures:
    """Return the failure that the README begins with."""
    return {"failure": terminal(folder, browser, "test_gather.py", "README.md", columns=80)}


def hang(folder: Path, browser: Browser) -> Pictures:
    """Return the two hangs of the page on debugging."""
    return {"hang": terminal(folder, browser, "test_hangs.py", "docs/how_to/debug.md", columns=100)}


# Pages

STEP = """\
import pytest
import torch
from engine import Engine


@pytest.mark.ranks(4)
def test_a_step_of_sharded_and_replicated_layers(world):
    engine = Engine(world, fault="other_order")
    assert engine.step(engine.model(), torch.ones(2, 8)) > 0
"""


def timeline(folder: Path, browser: Browser) -> Pictures:
    """Return the page of a step in which rank 1 calls two groups in another order, down to its details."""
    shutil.copy(PROJECTS / "timeline" / "engine.py", folder)
    (folder / "test_step.py").write_text(STEP)
    printed_by(folder, "pytest", "--timeline=timelines", "test_step.py")
    browser.resize(900, 700, SCALE)
    (page,) = folder.glob("timelines/*/*/timeline.html")
    browser.open(page)
    browser.press("Tab")  # to the fault
    return {"timeline": browser.picture(0, browser.boxes("#details")[0].bottom + MARGIN)}


def conformance(folder: Path, browser: Browser) -> Pictures:
    """Return the page of three engines, one of which has twenty lines: what is broken, and the claims."""
    (folder / "suites").mkdir()
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(CHECKOUT / "suites" / name, folder / "suites")
    shutil.copytree(CHECKOUT / "suites" / "core", folder / "suites" / "core")
    shutil.copy(CHECKOUT / "suites" / "selftest" / "conformance" / "sample_engine.py", folder)
    engines = [f"--engine={name}" for name in ("lockstep", "torch-fsdp2", "sample_engine:HandDDP")]
    claims = ("suites/core/test_reduction.py", "-k", "sparse or hook or withhold or frozen or fp64")
    printed_by(folder, "lockstep", "conformance", *engines, *claims)
    browser.resize(1010, 1000, SCALE)
    browser.open(folder / "conformance-report" / "conformance.html")
    middle = browser.boxes("#claims")[0].top - MARGIN
    end = browser.boxes("#table")[0].bottom + MARGIN
    return {"conformance": browser.picture(0, middle), "claims": browser.picture(middle, end)}


MAKERS: list[Callable[[Path, Browser], Pictures]] = [failure, hang, timeline, conformance]

if __name__ == "__main__":
    main(sys.argv[1:])
