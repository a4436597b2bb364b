"""Limits of what is given to libcst, measured by Python's own tokenizer. Must not import libcst or torch."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator

MOST_NESTED = 100
"""Brackets within brackets. Python reads 200; libcst 1.8 ends the process by SIGSEGV at 3,000."""

MOST_IN_ROW = 2_000
"""Tokens of an expression without a comma or a bracket that closes over them, and `elif` of a file. A sum of
3,000 numbers took libcst 12 s to parse, and one of 20,000 had no end."""


class NotPorted(ValueError):
    """A file that cannot be converted; the message is the reason."""


def check_limits(code: str) -> None:
    """Check that libcst can be given a file.

    Raises:
        NotPorted: it is nested too deeply, or has too long an expression; the message names the line.
    """
    rows, elifs = [0], 0
    for token in _tokens(code):
        line = f"line {token.start[0]}"
        if token.string in ("(", "[", "{"):
            rows.append(0)
        elif token.string in (")", "]", "}"):
            del rows[max(len(rows) - 1, 1) :]
        if token.string in (",", ";") or token.type == tokenize.NEWLINE:
            rows[-1] = 0
        rows[-1] += token.type in (tokenize.OP, tokenize.NAME, tokenize.STRING, tokenize.NUMBER)
        elifs += token.string == "elif"
        if len(rows) > MOST_NESTED + 1:
            raise NotPorted(f"{line}: more than {MOST_NESTED} brackets are nested; write it in several steps")
        if max(rows[-1], elifs) > MOST_IN_ROW:
            what = (
                "branches `elif` in a file" if elifs > MOST_IN_ROW else "names, values and operators in a row"
            )
            raise NotPorted(f"{line}: more than {MOST_IN_ROW:,} {what}; write it in several steps")


def _tokens(code: str) -> Iterator[tokenize.TokenInfo]:
    try:
        yield from tokenize.generate_tokens(io.StringIO(code).readline)
    except (tokenize.TokenError, SyntaxError):
        return  # libcst has a better message for what is no Python
