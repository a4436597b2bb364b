"""Values of reports that are made ready to be sent, and errors outside of tests in words."""

from __future__ import annotations

import os
from collections import OrderedDict

import pytest
import torch

from lockstep.output import MAX_MESSAGE, MAX_TEXT
from lockstep.rank.reporter import describe_raised, sanitise


class Words(str):
    """A text of a class that the controller may not have."""


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("text", "text"),
        (None, None),
        (True, True),
        (1.5, 1.5),
        (torch.tensor([1, 2]), "tensor([1, 2])"),
        (Words("of a class"), "of a class"),
        ({1: torch.tensor(3)}, {"1": "tensor(3)"}),
        (OrderedDict(a=(torch.tensor(3), 1)), {"a": ("tensor(3)", 1)}),
        ({3, 4}, {3, 4}),
        (frozenset({"a"}), frozenset({"a"})),
        (["a", "b"], ["a", "b"]),
        ([torch.tensor(3), 1], ["tensor(3)", 1]),
        ([], []),
    ],
)
def test_a_value_is_sent_as_what_needs_no_modules(value: object, sent: object) -> None:
    found = sanitise(value)
    assert found == sent
    assert type(found) is type(sent)


def test_what_is_too_long_to_be_read_is_truncated() -> None:
    long = "x" * (MAX_TEXT + 1)
    assert sanitise("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert len(sanitise(long)) <= MAX_TEXT
    assert len(sanitise(Words(long))) <= MAX_TEXT
    crash = {"path": "a.py", "lineno": 1, "message": "x" * (MAX_MESSAGE + 1)}
    assert {**crash, "message": ""} == {**(found := sanitise(crash)), "message": ""}
    assert len(found["message"]) <= MAX_MESSAGE
    other = {"message": "x" * (MAX_MESSAGE + 1)}
    assert sanitise(other) == other
    assert all(len(line) <= MAX_MESSAGE for line in sanitise(["x" * (MAX_MESSAGE + 1), "y"]))


def test_an_error_outside_of_tests_has_the_frames_of_the_user() -> None:
    try:
        os.stat("/nowhere")
    except OSError as error:
        lines = describe_raised(error).splitlines()
    assert lines[0].startswith(f"{os.path.relpath(__file__)}:") or __file__ in lines[0]
    assert lines[1:] == [
        '    os.stat("/nowhere")',
        "E   FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'",
    ]


def test_errors_of_usage_and_of_no_frame_are_their_words() -> None:
    assert describe_raised(pytest.UsageError("write a number")) == "write a number"
    with pytest.raises(ValueError) as raised:
        pytest.approx(1.0, abs=-1.0) == 2.0  # noqa: B015
    error = raised.value.with_traceback(raised.tb.tb_next)
    assert describe_raised(error) == f"ValueError: {error}"
