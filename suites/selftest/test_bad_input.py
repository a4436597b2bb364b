"""Bad input of any kind: the answer is a sentence and an exit status, soon, and nothing stays behind.

Hypothesis draws marks, options, commands and stored files, the same ones in each run; under
`--hypothesis-profile=long` it draws twenty times as many, at random. What once failed has a name below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from suites.selftest.bad_input import met, sessions, stored
from suites.selftest.bad_input.attempt import RANKS, Attempt, Ended, Supervisor

IS_LONG = settings.get_current_profile_name() == "long"


def draws(number: int) -> settings:
    """Return settings that draw the same examples in each run, or, under the profile `long`, others."""
    return settings(
        max_examples=20 * number if IS_LONG else number,
        derandomize=not IS_LONG,
        database=settings().database if IS_LONG else None,
        deadline=None,
        phases=[phase for phase in Phase if phase != Phase.explain],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
    )


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def check(supervisor: Supervisor, attempt: Attempt) -> None:
    ended = supervisor.run(attempt)
    if problems := ended.problems():
        pytest.fail("\n".join([*problems, f"{attempt}", ended.output[-5000:]]), pytrace=False)


@pytest.mark.parametrize("name", met.ATTEMPTS)
def test_input_that_was_met(supervisor: Supervisor, name: str) -> None:
    check(supervisor, met.ATTEMPTS[name])


# Each a session of about twenty marks, and of calls of fixtures: ranks take two seconds to start.
@draws(3)
@given(st.lists(sessions.cases, min_size=12, max_size=40))
def test_marks_and_arguments_of_fixtures(supervisor: Supervisor, cases: list[sessions.Case]) -> None:
    check(supervisor, sessions.attempt_of(cases))


@draws(40)
@given(sessions.configured)
def test_options(supervisor: Supervisor, attempt: Attempt) -> None:
    check(supervisor, attempt)


@draws(2)
@given(sessions.on_ranks)
def test_options_of_tests_on_ranks(supervisor: Supervisor, attempt: Attempt) -> None:
    check(supervisor, attempt)


@draws(60)
@given(stored.commands)
def test_commands_and_the_files_that_they_read(supervisor: Supervisor, attempt: Attempt) -> None:
    check(supervisor, attempt)


@draws(4)
@given(stored.found_by_itself)
def test_files_that_no_user_has_named(supervisor: Supervisor, attempt: Attempt) -> None:
    check(supervisor, attempt)


# The judge


def test_every_mark_that_is_registered_is_drawn(supervisor: Supervisor) -> None:
    with_ours, without = (
        set(re.findall(r"mark\.(\w+)", supervisor.run(Attempt(("pytest", "--markers", *more))).output))
        for more in (("-p", "lockstep.plugin"), ())
    )
    assert with_ours - without == {*sessions.ACCEPTED}


def planted(body: str, conftest: str = "", seconds: float = 60.0) -> Attempt:
    files = {
        "pytest.ini": "[pytest]\n",
        "conftest.py": conftest,
        "test_it.py": f"def test_it():\n    {body}\n",
    }
    return Attempt(sessions.PYTEST, files, seconds=seconds)


def test_a_sentence_is_no_problem(supervisor: Supervisor) -> None:
    assert supervisor.run(planted("assert 1 == 2, 'no'")).problems() == []


def test_ranks_start(supervisor: Supervisor) -> None:
    ended = supervisor.run(Attempt(sessions.PYTEST, {"test_sample.py": sessions.ON_RANKS}, seconds=RANKS))
    assert (ended.problems(), ended.status) == ([], 0), ended.output


def test_an_internal_error_is_found(supervisor: Supervisor) -> None:
    ended = supervisor.run(
        planted("pass", "def pytest_runtest_protocol(item):\n    raise KeyError(item.name)\n")
    )
    assert ended.problems() == ["its exit status is 3", "pytest reports an INTERNALERROR"]


def test_a_hang_is_found_and_ended(supervisor: Supervisor) -> None:
    ended = supervisor.run(planted("__import__('time').sleep(100)", seconds=2.0))
    assert ended.problems() == ["it hung"]
    assert ended.seconds < 30


def test_much_memory_is_found(supervisor: Supervisor) -> None:
    (problem,) = supervisor.run(planted("b'x' * (1 << 30)")).problems()
    assert problem.startswith("a process used 1")


def test_a_death_is_found(supervisor: Supervisor) -> None:
    assert supervisor.run(planted("__import__('os').abort()")).problems() == ["its exit status is -6"]


def test_a_process_and_a_file_that_stay_are_found(supervisor: Supervisor) -> None:
    body = (
        "import subprocess, tempfile; tempfile.mkstemp(prefix='left-'); "
        "subprocess.Popen(['sleep', '1000'], start_new_session=True).returncode = 0"
    )
    process, file = supervisor.run(planted(body)).problems()
    assert process == "left behind: sleep 1000 "
    assert file.startswith("left behind: left-")


OF_PYTHON = """\
Traceback (most recent call last):
  File "/x/harness/conformance/stored.py", line 64, in load
    content = json.loads(text)
KeyError: 'format'
"""
OF_PYTEST = """\
/x/harness/marker.py:109: in _parse
    if not set(mark.needs) <= NEEDS.keys():
/usr/lib/python3.11/site-packages/other.py:3: in other
    call()
E   TypeError: unhashable type: 'list'
"""


def test_a_traceback_through_the_harness_is_found() -> None:
    assert Ended(1, OF_PYTHON).problems() == ["a traceback of ours: KeyError: 'format'"]
    (problem,) = Ended(1, OF_PYTEST).problems()
    assert problem.endswith("TypeError: unhashable type: 'list' at /x/harness/marker.py:109: in _parse")


def test_a_traceback_of_the_users_or_an_error_that_is_raised_is_none() -> None:
    raised = OF_PYTEST.replace("if not set(mark.needs) <= NEEDS.keys():", 'raise ValueError("a sentence")')
    assert Ended(1, raised).problems() == []
    assert Ended(1, OF_PYTEST.replace("harness/marker.py", "test_it.py")).problems() == []
    assert Ended(1, OF_PYTHON.replace("harness/", "project/")).problems() == []
