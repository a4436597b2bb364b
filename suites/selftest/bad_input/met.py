"""Bad input that once got another answer than a sentence, by the name of what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping

from suites.selftest.bad_input.attempt import FIFO, RANKS, Attempt
from suites.selftest.bad_input.sessions import (
    GOLDEN,
    PLACES,
    PYTEST,
    Case,
    attempt_of,
    held_golden,
    in_test,
    marked,
)
from suites.selftest.bad_input.stored import ROSTER, SECRET, TABLE, held_lease, roster

_INI = {"pytest.ini": "[pytest]\n"}
_LAUNCHER = ("SIZE", "RANK", "LOCAL_SIZE")
_CYCLE = (
    "from torch.testing._internal.common_distributed import MultiProcessTestCase\n"
    "class A(B): pass\nclass B(A, MultiProcessTestCase):\n    def test_it(self): pass\n"
)
_SUM = _CYCLE.replace("(B)", "").replace("(A, ", "(") + f"    world_size = {'1+' * 20_000}1\n"


def _marks(*marks: str) -> Attempt:
    return attempt_of([Case(marked(mark, "function")) for mark in marks])


def _calls(*calls: str) -> Attempt:
    # On one rank: each looks at its arguments alone, and ends with the test that fails.
    return attempt_of([Case(in_test(call, ranks=1)) for call in calls])


def _goldens(*words: str) -> Attempt:
    damaged = [GOLDEN.replace("norm 1", f"norm {word}") for word in words]
    return attempt_of([held_golden(contents, ranks=1) for contents in (*damaged, FIFO)])


def _run(*options: str) -> Attempt:
    return Attempt((*PYTEST, "--world-timeout=20", *options), {**PLACES, **_INI}, seconds=RANKS)


def _collect(*options: str, ini: str = "") -> Attempt:
    return Attempt((*PYTEST, "--collect-only", *options), {**PLACES, "pytest.ini": f"[pytest]\n{ini}\n"})


def _command(*words: str, **stored: str | bytes | None) -> Attempt:
    return Attempt(("harness", *words), {**PLACES, **stored}, SECRET)


ATTEMPTS: Mapping[str, Attempt] = {
    "a timeout that is no float, large worlds, a need that cannot be hashed, 10**9 seeds": _marks(
        *("ranks(2, timeout=10**400)", "ranks(10**30)", "ranks(10**8)", "ranks(2, needs=[['x']])"),
        "skew(seeds=10**9)",
    ),
    "arguments of faults": _calls(
        *("faults.delay('x', before='any')", "faults.delay(10**400)", "faults.delay(1.0, before=3)"),
        *(
            "faults.fail(error=3)",
            "faults.kill(rank='x')",
            "faults.kill(before=[])",
            "faults.corrupt(10**400)",
        ),
        *("faults.corrupt(op={})", "faults.expect(3)", "faults.expect('x', within='y')"),
    ),
    "arguments of goldens": _calls(
        "golden(1.5)", "golden('a/b')", "golden('a', tolerance='x')", "golden('a', tolerance=[])", "golden()"
    ),
    "numbers of goldens, and one that is a FIFO": _goldens("x", "1e", "9" * 5000, "nan", ""),
    **{f"--world-timeout {word}": _run(f"--world-timeout={word}") for word in ("nan", "inf", "1e300")},
    "a seed of 5000 digits": _collect(f"--world-seed={'9' * 5000}"),
    "a seed of 27 digits": _run(f"--world-seed={'9' * 27}"),
    "no backend": _run("--backend="),
    "0 hosts": _run("--ranks-hosts=0"),
    "-3 ranks on a host": _run("--ranks-per-host=-3"),
    "a shared directory that does not exist": _run("--shared-dir=nosuch"),
    "a lease that is no text": held_lease(b"\xff"),
    "a lease of nested brackets": held_lease("[" * 100_000),
    "a lease that is a FIFO": held_lease(FIFO),
    "a lease of another form": held_lease("[]"),
    "a roster of nested brackets": roster("[" * 100_000),
    "a roster of another form": roster("[]"),
    "a roster that is empty": roster(""),
    "a roster that is a FIFO": roster(FIFO),
    "a roster with a host of another form": roster(ROSTER.replace('"b"', "[]")),
    "a roster without hosts": roster(ROSTER.replace('"hosts"', '"hosts": [], "others"')),
    "a temporary folder whose name is no UTF-8": Attempt(
        (*PYTEST, "--world-timeout=20"), {**PLACES, **_INI}, temporary="tmp\udcff", seconds=RANKS
    ),
    "a launcher that counts in other digits": Attempt(
        (*PYTEST, "--collect-only"),
        {**PLACES, **_INI},
        {f"OMPI_COMM_WORLD_{each}": "²" for each in _LAUNCHER},
    ),
    "a table of nested brackets": _command("conformance", "--merge", "stored", stored="[" * 100_000),
    "a table with other types": _command(
        "conformance", "--merge", "stored", stored=TABLE.replace('{"slow": 1}', "[3]")
    ),
    "a table with other versions": _command(
        "conformance", "--diff", "stored", "stored", stored=TABLE.replace('{"torch": "2.13.0"}', "3")
    ),
    "an output that is a file": _command("conformance", "--merge", "stored", "--output=file", stored=TABLE),
    "port of bases in a cycle": _command("port", "stored", stored=_CYCLE),
    "port of nested brackets": _command("port", "stored", stored="x = " + "[" * 100_000),
    "port of closed brackets": _command("port", "stored", stored=f"x = {'[' * 3000}{']' * 3000}\n"),
    "port of a long sum": _command("port", "stored", stored=_SUM),
    "port into a file": _command("port", "--output=file", "stored", stored=_CYCLE.replace("(B)", "")),
    **{
        f"hosts {word}": _command("hosts", *word.split(" "))
        for word in (
            *("--node=1/2 --meet=127.0.0.1:²", "--node=1/2 --meet=127.0.0.1:99999", "--node=²/³ --meet=a:1"),
            *(
                "--node=1/2 --meet=127.0.0.1:1 --wait=nan",
                "--node=0/2 --meet=127.0.0.1:0 --wait=-1",
                "--node=0/2 --meet=é..é:1",
            ),
            *(
                f"--node=1/2 --meet=127.0.0.1:1 --wait=0 --secret-file={path}"
                for path in ("folder", "broken.json")
            ),
        )
    },
    "hosts with a secret that is a FIFO": _command(
        *("hosts", "--node=1/2", "--meet=127.0.0.1:1", "--wait=0", "--secret-file=fifo")
    ),
}
