"""Copies of the project with an edit that only their own processes see; what is edited, and its claims."""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from mutants.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def room_of(file: str) -> str:
    """Return the folder of self-tests of a file's room or feature; those of no room are at the top."""
    parts = PurePath(file.removeprefix("features/")).parts
    return parts[0] if len(parts) > 1 else "selftest"


def digest(paths: Iterable[Path], *words: str) -> str:
    """Return a name for what the files have in them, and for the words."""
    contents = (path.read_bytes() for path in sorted(paths))
    return hashlib.sha256(b"\0".join([*contents, *(word.encode() for word in words)])).hexdigest()[:16]


@dataclass(frozen=True)
class Subject:
    """Files that are mutated, and the tests that are their claims.

    Attributes:
        folder: of what is mutated; files are named from there.
        without: the folders in it that are not mutated.
        recorded: how many cases of each function are recorded on each backend, and below which folders.
        apart: the names of folders of tests that take no part.
        wanted: the share that is to be killed, of those that are not equivalent.
        options: of pytest.
    """

    name: str
    folder: str
    without: tuple[str, ...]
    recorded: Mapping[str, tuple[int, tuple[str, ...]]]
    apart: tuple[str, ...]
    wanted: float
    options: tuple[str, ...] = ()

    def files(self, root: Path = ROOT) -> list[Path]:
        """Return the files that are mutated."""
        top = root / self.folder
        apart = [top / each for each in self.without]
        files = sorted(top.rglob("*.py"))
        return [each for each in files if not any(each.is_relative_to(folder) for folder in apart)]

    def mutants(self, root: Path = ROOT) -> Iterator[Mutant]:
        for path in self.files(root):
            yield from mutants_of(str(path.relative_to(root / self.folder)), path.read_text())


SUBJECTS = {
    # On shm some lines of the engine differ.
    "engine": Subject(
        "engine",
        "harness/engine",
        (),
        {"gloo": (4, ("suites",)), "shm": (1, ("suites/core", "suites/replicate"))},
        ("engine", "selftest"),
        0.95,
    ),
    # A session that hangs is one that a self-test has started, and would wait for much longer.
    "core": Subject(
        "core",
        "harness",
        # A model that claims compare engines with is on both sides: another one compares as well.
        ("engine", "conformance/adapters", "conformance/models", "port"),
        {"gloo": (4, ("suites/selftest",))},
        ("projects",),
        0.9,
        ("--timeout=100",),
    ),
}


class Base:
    """A copy of the project as it is, below all that tests run in."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder = folder
        self.subject = subject
        command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(command, text=True).split("\0"):
            if name and os.path.lexists(ROOT / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        for package in ("harness", "suites"):
            compileall.compile_dir(folder / package, quiet=2)

    @property
    def top(self) -> Path:
        return self.folder / self.subject.folder

    def tests(self) -> list[Path]:
        """Return the files of claims, and what is beside them."""
        folders = {each for _, folders in self.subject.recorded.values() for each in folders}
        files = (path for folder in folders for path in (self.folder / folder).rglob("*") if path.is_file())
        return [
            path
            for path in files
            if path.suffix != ".pyc" and not {*self.subject.apart} & {*path.relative_to(self.folder).parts}
        ]

    def claims(self) -> dict[str, list[Path]]:
        """Return the names of the files of claims, each with itself and the conftest files that it sees."""
        return {
            str(path.relative_to(self.folder)): [
                path,
                *(each for folder in path.parents for each in folder.glob("conftest.py")),
            ]
            for path in self.tests()
            if path.match("test_*.py")
        }

    def shared(self) -> list[Path]:
        """Return the files that any claim may depend on: all of harness, and of tests but the claims."""
        harness = (path for path in (self.folder / "harness").rglob("*") if path.is_file())
        found = [self.folder / "conftest.py", self.folder / "pyproject.toml", *harness, *self.tests()]
        claims = {self.folder / name for name in self.claims()}
        return [each for each in found if each not in claims and each.suffix != ".pyc"]


ENTER = """
mount -t overlay overlay -o "lowerdir=$1:$2,upperdir=$3/edits,workdir=$3/work" "$2" &&
mount --bind "$3/tmp" /tmp && mount -t tmpfs tmpfs /dev/shm && cd "$2" && shift 3 && "$@"
exit $?
"""
"""Runs "$4" and so on with a copy "$1" of the project in place of the project "$2", and edits of "$3"."""


class Copy:
    """The project with edits, where only the processes see it that are started here.

    They see no other process either, and end together: a mutant may signal the wrong ones, or hang. What they
    see as /tmp is `tmp`.
    """

    def __init__(self, folder: Path, base: Base) -> None:
        self.folder = folder
        self.base = base
        self.tmp = folder / "tmp"
        for name in ("edits", "work", "tmp"):
            (folder / name).mkdir()

    def edit(self, file: str, text: str) -> None:
        path = self.folder / "edits" / self.base.subject.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def pytest(self, arguments: Sequence[str], limit: float, path: Sequence[Path] = (), **own: str) -> int:
        """Run pytest with the plugin `claims`; return its exit status, -1 if it took longer than `limit`.

        Args:
            path: more folders of PYTHONPATH.
        """
        user = () if os.getuid() == 0 else ("--user", "--map-root-user")
        apart = ("unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        enter = ("sh", "-c", ENTER, "sh", str(self.base.folder), str(ROOT), str(self.folder))
        run = (sys.executable, "-m", "pytest", "-p", "claims", "-p", "no:cacheprovider", "-q")
        command = ["setpriv", "--pdeathsig=KILL", *apart, *enter, *run, *self.base.subject.options]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, HERE))), **own}
        for name in ("TMPDIR", "PYTHONDONTWRITEBYTECODE"):
            environ.pop(name, None)
        with open(self.folder / "output.txt", "w") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return -1

    def output(self, length: int = 2000) -> str:
        """Return the end of what pytest has printed; all of it for -1."""
        text = (self.folder / "output.txt").read_text(errors="replace")
        return text if length < 0 else text[-length:]


@contextlib.contextmanager
def copy_of(base: Base) -> Iterator[Copy]:
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        yield Copy(Path(folder), base)
