"""The page of a timeline, and the index of a run's pages: HTML that needs no network. In the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from lockstep.features.timeline.svg import KINDS, draw, identify, kind_of, times
from lockstep.features.timeline.timeline import Timeline

MOST = 64
"""Collectives in a picture: the last ones; the file for Perfetto has all that are recorded."""
_NOTE = """From left to right in the order of time, which is not to scale: waits are compressed. Ranks share
the clock of one host. A bar begins where its rank called the collective; where torch does not record the end
(gloo), it ends soon after the last rank has called it."""
_HINT = """Choose a bar: with the pointer, or with Tab and the arrow keys.
Enter leads to its row in the table."""
_TEMPLATES = Path(__file__).parent / "templates"
_COLOURS = {
    **dict(zip(KINDS, ("gather", "scatter", "reduce", "exchange", "broadcast", "barrier"), strict=True)),
    "other": "other",
}


def page_of(timeline: Timeline, outcome: str, report: str) -> str:
    """Return the page of a test.

    Args:
        outcome: "passed", say.
        report: text of its failure.
    """
    shown = timeline.last(MOST)
    cause = timeline.sentence or report.partition("\n")[0]
    sentence = f'<p class="sentence">{escape(cause)}</p>' if cause else ""
    text = f"<section><h2>Report</h2><pre tabindex=0>{escape(report)}</pre></section>" if report else ""
    left_out = f" {shown.num_left_out} earlier calls are left out." if shown.num_left_out else ""
    body = f"""<h1>{escape(timeline.nodeid)}</h1>
<p>{escape(outcome)}, on {len(timeline.lanes)} rank{"s" if len(timeline.lanes) > 1 else ""}</p>
{sentence}
<div class="picture">{draw(shown)}</div>
{_legend(shown)}
<p class="dim"><small>{_NOTE}{left_out}</small></p>
<div class="beside"><section><h2>Details</h2>
<pre id="details" aria-live="polite">{_HINT}</pre></section>{text}</div>
<h2>Calls</h2>
<div class="wide" tabindex="0"><table>
<thead><tr><th>rank<th>call<th>group<th>when<th>tensors<th>bytes<th>phase<th>line</tr></thead>
<tbody>{_rows(shown)}</tbody></table></div>
<script>{(_TEMPLATES / "page.js").read_text()}</script>"""
    return _document(timeline.nodeid, body)


def _document(title: str, body: str) -> str:
    style = (_TEMPLATES / "page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def _legend(timeline: Timeline) -> str:
    used = {kind_of(bar) for lane in timeline.lanes for bar in lane.bars}
    parts = [
        f'<li><i style="background:var(--{_COLOURS[kind]})"></i>{kind}' for kind in _COLOURS if kind in used
    ]
    for group, letter in timeline.letters().items():
        members = ", ".join(map(str, timeline.members(group)))
        parts.append(f"<li><b>{letter}</b>: ranks {members} (torch's group {escape(group.split()[0])})")
    return f'<ul class="legend">{"".join(parts)}</ul>'


def _rows(timeline: Timeline) -> str:
    calls = [(bar.begun, lane.rank, bar) for lane in timeline.lanes for bar in lane.bars]
    rows = []
    for _, rank, bar in sorted(calls, key=lambda call: call[:2]):
        bad = ' class="bad"' if bar.is_in_vain or bar.is_mismatch else ""
        cells = (bar.key[0], times(bar, timeline), bar.tensors, _bytes(bar.num_bytes), bar.phase)
        rows.append(
            f'<tr id="{identify(rank, bar)}"><td>{rank}<td{bad}>{escape(bar.name)}'
            + "".join(f"<td>{escape(cell)}" for cell in cells)
            + f"<td>{'<br>'.join(map(escape, bar.lines[:3]))}</tr>"
        )
    return "\n".join(rows)


def _bytes(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def index_of(tests: Iterable[Mapping[str, Any]]) -> str:
    """Return the page that lists the pages of a run.

    Args:
        tests: `nodeid`, `page` (a path below the folder), `outcome`, `ranks`, `calls` and `ms` of each.
    """
    rows = "\n".join(
        f"<tr><td{'' if test['outcome'] == 'passed' else ' class=bad'}>{escape(test['outcome'])}"
        f'<td><a href="{escape(test["page"])}">{escape(test["nodeid"])}</a>'
        f"<td>{test['ranks']}<td>{test['calls']}<td>{test['ms']:.1f}</tr>"
        for test in tests
    )
    body = f"""<h1>Timelines</h1>
<div class="wide"><table>
<thead><tr><th>outcome<th>test<th>ranks<th>calls<th>ms, first call to end</tr></thead>
<tbody>{rows}</tbody></table></div>"""
    return _document("Timelines", body)
