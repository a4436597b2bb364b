"""Unit tests of the picture of a timeline: where lanes, bars, joins and labels are, and what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from lockstep.features.timeline import svg
from lockstep.features.timeline.page import index_of, page_of
from lockstep.features.timeline.svg import describe, draw, identify, kind_of, times
from lockstep.features.timeline.timeline import Bar, Key, Lane, Span, State, Timeline
from lockstep.flight_entries import DEFAULT_GROUP


class Linear:
    """A scale with a per cent for each nanosecond, and a width that is given."""

    width = 1000.0

    def __init__(self, timeline: Timeline) -> None:
        pass

    def left(self, moment: int) -> float:
        return float(moment)

    right = left

    def units(self, left: float, right: float) -> float:
        return (right - left) * self.width / 100


@pytest.fixture(autouse=True)
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "Scale", Linear)


def bar(number: int, begun: int, end: int, state: State = "over", **fields: Any) -> Bar:
    group = fields.pop("group", DEFAULT_GROUP)
    given = {"op": "barrier", "has_end": True, **fields}
    return Bar((group, 0, number), begun=begun, end=end, state=state, **given)


def lane(rank: int, *bars: Bar, missing: tuple[Key, ...] = (), **fields: Any) -> Lane:
    given = {"fate": "passed", "place": "", "spans": (), **fields}
    return Lane(rank, bars, missing, **given)


def timeline(*lanes: Lane, **fields: Any) -> Timeline:
    return Timeline("a<b", lanes, 0, 100, **fields)


class Picture:
    """The elements of a picture."""

    def __init__(self, drawn: Timeline) -> None:
        self.text = draw(drawn)
        self.names, self.svg = ElementTree.fromstring(f"<p>{self.text}</p>")

    def of(self, tag: str, kind: str) -> list[dict[str, str]]:
        """Return the attributes of elements of a tag whose class begins with a word."""
        found = [each.attrib for each in self.svg.iter(tag)]
        return [each for each in found if each.get("class", "").partition(" ")[0] == kind]

    def boxes(self, kind: str) -> list[tuple[str, str, str, str]]:
        """Return x, y, width and height of the boxes around rectangles of a kind."""
        return [
            tuple(box.attrib[name] for name in ("x", "y", "width", "height"))  # type: ignore[misc]
            for box in self.svg.iter("svg")
            if (rect := box.find("rect")) is not None and rect.attrib["class"].split()[0] == kind
        ]

    def labels(self, kind: str) -> list[list[str]]:
        """Return the labels of the boxes of a kind."""
        return [
            [text.text or "" for text in box.findall("text")]
            for box in self.svg.iter("svg")
            if (rect := box.find("rect")) is not None and rect.attrib["class"].split()[0] == kind
        ]

    def joins(self) -> list[tuple[str, str, list[tuple[str, ...]]]]:
        """Return class, collective and lines of each join."""
        return [
            (
                group.attrib["class"],
                group.attrib["data-key"],
                [tuple(line.attrib[name] for name in ("x1", "y1", "x2", "y2")) for line in group],
            )
            for group in self.svg.findall("g")
            if group.attrib["class"].startswith("join")
        ]


def test_bars_that_overlap_a_little_are_in_rows_of_their_own() -> None:
    bars = [bar(3, 20, 30), bar(1, 0, 10), bar(2, 9, 19), bar(4, 19, 25)]
    rows = svg._rows(lane(0, *bars), Linear(timeline()))  # type: ignore[arg-type]
    assert [[each.key[2] for each in row] for row in rows] == [[1, 4], [2, 3]]


def test_times_of_a_long_test_are_exact() -> None:
    late = bar(1, 9_000_000_000_000, 9_500_000_000_000)
    said = "begun at 9000000.000 ms, took 500000.000 ms"
    assert times(late, Timeline("id", (), 0, 10**13)) == said


def test_a_lane_is_as_high_as_the_rows_of_what_overlaps() -> None:
    overlap = bar(1, 10, 40), bar(2, 20, 30), bar(3, 30, 50), bar(4, 40, 60)
    picture = Picture(timeline(lane(0, *overlap), lane(1), lane(2)))
    # The lanes begin at 4, at 4 + 18 + 14 + 2 * 24 + 16, and at that + 18 + 14 + 24 + 16.
    assert [name.attrib["style"] for name in picture.names] == ["top:4px", "top:100px", "top:172px"]
    assert picture.svg.attrib["height"] == "244"
    assert picture.svg.attrib["style"] == "min-width:700px"
    assert picture.svg.attrib["aria-label"] == "Timeline of a<b: 3 ranks"
    assert picture.boxes("bar") == [
        ("10.00%", "36", "30.00%", "22"),
        ("40.00%", "36", "20.00%", "22"),
        ("20.00%", "60", "10.00%", "22"),
        ("30.00%", "60", "20.00%", "22"),
    ]
    assert [(line["x2"], line["y1"], line["y2"]) for line in picture.of("line", "compute")] == [
        ("100.00%", "48", "48"),
        ("100.00%", "144", "144"),
        ("100.00%", "216", "216"),
    ]


def test_a_picture_has_a_width_that_no_window_has_to_exceed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "width", 10_000.0)
    assert Picture(timeline(lane(0))).svg.attrib["style"] == "min-width:6000px"


def test_a_short_bar_is_eight_units_wide() -> None:
    assert Picture(timeline(lane(0, bar(1, 10, 10)))).boxes("bar") == [("10.00%", "36", "0.80%", "22")]


def test_a_name_says_how_and_where_a_rank_ended() -> None:
    dead = lane(1, fate="died: <SIGKILL>", place="a.py:1", is_blamed=True)
    first, second = Picture(timeline(lane(0), dead)).names
    assert ("".join(first.itertext()), first.get("class")) == ("rank 0 passed", None)
    assert ("".join(second.itertext()), second.get("class")) == (
        "rank 1 died: <SIGKILL>: a.py:1",
        "blamed",
    )


def test_a_death_ends_the_line_of_a_lane_with_a_cross() -> None:
    for died_at, line, cross in ((50, "50.00%", "50.00%"), (100, "100.00%", "99.00%"), (0, "0.00%", "0.00%")):
        picture = Picture(timeline(lane(0, fate="died", died_at=died_at)))
        assert [each["x2"] for each in picture.of("line", "compute")] == [line]
        (box,) = picture.svg.find("g").findall("svg")  # type: ignore[union-attr]
        assert (box.attrib["x"], box.attrib["y"]) == (cross, "36")
        assert box.findtext("title") == "rank 0 died"
    assert not Picture(timeline(lane(0))).of("path", "death")


def test_phases_are_thin_and_below_the_labels_of_what_is_inside() -> None:
    spans = Span("[case]", 20, 40), Span("call", 10, 90), Span("backward", 30, 35, is_measured=False)
    picture = Picture(timeline(lane(0, spans=spans)))
    assert [each["class"] for each in picture.of("rect", "span")] == [
        "span phase",
        "span phase",
        "span backward",
    ]
    assert picture.boxes("span") == [
        ("10.00%", "30", "80.00%", "4"),
        ("20.00%", "23", "20.00%", "10"),
        ("30.00%", "23", "5.00%", "10"),
    ]
    assert picture.labels("span") == [[], ["[case]"], ["backward"]]
    titles = [box.findtext("title") for box in picture.svg.find("g").findall("svg")]  # type: ignore[union-attr]
    assert titles == ["call", "[case]", "backward, from its first to its last collective"]


@pytest.mark.parametrize("name", ["forward", "backward", "optimizer", "fixture"])
def test_parts_of_a_step_have_a_colour_of_their_own(name: str) -> None:
    (rect,) = Picture(timeline(lane(0, spans=(Span(name, 1, 2),)))).of("rect", "span")
    assert rect["class"] == f"span {name}"


def test_phases_before_the_picture_or_of_no_width_are_left_out() -> None:
    spans = Span("setup", 0, 10), Span("call", 10, 11), Span("[a]", 20, 20)
    drawn = replace(timeline(lane(0, spans=spans)), begun=10)
    assert Picture(drawn).boxes("span") == [("10.00%", "30", "1.00%", "4")]


def test_a_collective_that_a_rank_never_began_is_below_its_bars() -> None:
    waits = bar(2, 30, 100, "waits", group="7 of 8")
    picture = Picture(timeline(lane(0, bar(1, 10, 20), waits), lane(1, bar(1, 10, 20), missing=(waits.key,))))
    assert picture.boxes("missing") == [("30.00%", "132", "70.00%", "22")]
    assert picture.labels("missing") == [["never came: barrier #2 A"]]
    assert picture.svg.attrib["height"] == str(4 + 72 + 96)
    assert picture.of("rect", "missing")[0]["class"] == "missing"
    assert picture.of("text", "never")[0]["class"] == "never"
    assert picture.joins() == [
        ("join", f"{DEFAULT_GROUP}/0/1", [("10.00%", "58", "10.00%", "108")]),
        ("join fault", "7 of 8/0/2", [("30.00%", "58", "30.00%", "132")]),
    ]
    assert [each["class"] for each in picture.of("rect", "bar")] == [
        "bar barrier over",
        "bar barrier waits turn",
        "bar barrier over",
    ]


def test_what_is_missing_begins_where_the_ranks_own_last_call_ended() -> None:
    waits = bar(2, 30, 100, "waits"), bar(3, 40, 100, "waits")
    late = lane(1, bar(1, 10, 98, "inferred"), missing=(waits[0].key, waits[1].key, ("", 0, 9)))
    picture = Picture(timeline(lane(0, *waits), late))
    assert [each[0] for each in picture.boxes("missing")] == ["98.00%"]
    assert [each[2] for each in picture.boxes("missing")] == ["3.00%"]
    assert picture.labels("missing") == [["never came: barrier #2, barrier #3"]]
    failed = replace(late, bars=(replace(late.bars[0], state="failed"),))
    assert [each[0] for each in Picture(timeline(lane(0, *waits), failed)).boxes("missing")] == ["30.00%"]


def test_a_missing_box_begins_with_the_first_of_the_others() -> None:
    waits = bar(2, 30, 100, "waits")
    others = lane(0, waits), lane(2, replace(waits, begun=40, state="failed"))
    late = lane(1, bar(0, 1, 5), bar(1, 10, 35), missing=(waits.key,))
    assert [each[0] for each in Picture(timeline(*others, late)).boxes("missing")] == ["35.00%"]
    early = replace(late, bars=late.bars[:1])
    picture = Picture(timeline(*others, early))
    assert [each[0] for each in picture.boxes("missing")] == ["30.00%"]
    over = bar(3, 50, 60)
    groups = {(DEFAULT_GROUP, 0): (0, 1)}
    mixed = lane(0, replace(over, state="failed")), lane(1, over), lane(2, missing=(over.key,))
    assert [kind for kind, *_ in Picture(timeline(*mixed, groups=groups)).joins()] == ["join turn"]


def test_a_rank_that_waits_for_the_one_at_fault_is_pale() -> None:
    waits, other = bar(1, 30, 100, "waits"), bar(2, 30, 100, "waits")
    lanes = lane(0, waits, missing=(other.key,)), lane(1, other), lane(2, missing=(waits.key,))
    picture = Picture(timeline(*lanes))
    assert [each["class"] for each in picture.of("rect", "missing")] == ["missing turn", "missing"]
    assert [kind for kind, *_ in picture.joins()] == ["join fault", "join turn"]
    assert [each["class"] for each in picture.of("text", "never")] == ["never turn", "never"]


def test_calls_of_a_rank_at_fault_are_not_pale() -> None:
    failed = bar(1, 10, 40, "failed", is_mismatch=True)
    lanes = (
        lane(0, failed),
        lane(1, bar(1, 10, 40, "failed"), is_blamed=True),
        lane(2, bar(1, 10, 40, "failed")),
    )
    picture = Picture(timeline(*lanes))
    assert [each["class"] for each in picture.of("rect", "bar")] == [
        "bar barrier failed mismatch",
        "bar barrier failed",
        "bar barrier failed turn",
    ]
    assert [kind for kind, *_ in picture.joins()] == ["join fault"]
    assert picture.labels("bar") == [["barrier #1 failed ≠"], ["barrier #1 failed"], ["barrier #1 failed"]]


def test_only_a_bar_that_is_over_can_have_an_open_end() -> None:
    states: list[State] = ["over", "inferred", "waits", "failed"]
    lanes = [lane(n, bar(n, 10, 20, state, has_end=False)) for n, state in enumerate(states)]
    classes = [each["class"] for each in Picture(timeline(*lanes)).of("rect", "bar")]
    assert classes == [
        "bar barrier over open",
        "bar barrier inferred open",
        "bar barrier waits turn",
        "bar barrier failed turn",
    ]


def test_a_bar_leads_to_its_row_and_knows_its_collective() -> None:
    picture = Picture(timeline(lane(3, bar(1, 10, 20, group="a & b"))))
    (link,) = picture.svg.iter("a")
    assert link.attrib == {"href": "#r3-10", "data-rank": "3", "data-key": "a & b/0/1"}
    assert identify(3, bar(1, 10, 20)) == "r3-10"


@pytest.mark.parametrize(
    ("units", "label"),
    [(113, "barrier #1 A"), (112, "#1 A"), (41, "#1 A"), (40, "#1"), (23, "#1"), (22, "")],
)
def test_a_label_is_shortened_to_what_fits(monkeypatch: pytest.MonkeyPatch, units: int, label: str) -> None:
    monkeypatch.setattr(Linear, "width", 100.0)
    assert Picture(timeline(lane(0, bar(1, 0, units, group="7")))).labels("bar") == [[label]]


def test_a_box_wider_than_a_window_has_its_label_at_both_ends() -> None:
    assert Picture(timeline(lane(0, bar(1, 0, 90)))).labels("bar") == [["barrier #1"]]
    assert Picture(timeline(lane(0, bar(1, 0, 91)))).labels("bar") == [["barrier #1"] * 2]


def test_a_join_leads_over_the_lanes_of_its_members_alone() -> None:
    overlap = bar(1, 5, 30, group="own"), bar(2, 10, 20, group="others")
    others = [lane(rank, bar(2, 10 + rank, 20, group="others")) for rank in (1, 2)]
    groups = {("others", 0): (0, 2, 9), ("own", 0): (0,)}
    picture = Picture(timeline(lane(0, *overlap), *others, groups=groups))
    assert picture.joins() == [
        ("join", "own/0/1", []),
        ("join", "others/0/2", [("10.00%", "82", "12.00%", "204")]),
    ]


def test_a_join_leaves_out_a_rank_without_a_record_of_it() -> None:
    picture = Picture(timeline(lane(0, bar(1, 10, 20)), lane(1), lane(2, bar(1, 15, 20))))
    assert picture.joins() == [("join", f"{DEFAULT_GROUP}/0/1", [("10.00%", "58", "15.00%", "180")])]


@pytest.mark.parametrize(
    ("op", "kind"), [("_all_gather_base", "all_gather"), ("all_to_all", "all_to_all"), ("send", "other")]
)
def test_an_operation_is_of_a_kind(op: str, kind: str) -> None:
    assert kind_of(bar(1, 0, 1, op=op)) == kind


def test_a_call_is_described_in_lines() -> None:
    lines = tuple(f"f{n}() at a.py:{n}" for n in range(5))
    call = bar(1, 1_500_000, 3_500_000, lines=lines, tensors="float [2]", num_bytes=8000, phase="forward")
    drawn = Timeline("id", (lane(0), lane(1)), 500_000, 10**7)
    assert describe(1, call, drawn).splitlines() == [
        "rank 1: barrier #1 of the default group (ranks 0, 1)",
        "float [2], 8,000 bytes",
        "begun at 1.000 ms, took 2.000 ms",
        "at f0() at a.py:0",
        "from f1() at a.py:1",
        "from f2() at a.py:2",
        "from f3() at a.py:3",
        "in forward",
    ]
    bare = bar(1, 1_500_000, 3_500_000, group="7", peer=0, op="send", has_end=False)
    drawn = replace(drawn, groups={("7", 0): (1,)})
    assert describe(1, bare, drawn).splitlines() == [
        "rank 1: send of group 7 (ranks 1)",
        "no tensor",
        "begun at 1.000 ms, took at least 2.000 ms",
    ]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("inferred", "by 1.000 ms: its own record is lost, the other ranks show it"),
        ("waits", "begun at 1.000 ms, in flight since 2.000 ms"),
        ("failed", "begun at 1.000 ms, failed"),
    ],
)
def test_a_call_says_when_it_began_and_how_it_ended(state: State, said: str) -> None:
    assert times(bar(1, 1_500_000, 3_500_000, state), Timeline("id", (), 500_000, 10**7)) == said


# Pages


def test_a_page_lists_calls_by_time_and_then_by_rank() -> None:
    drawn = timeline(
        lane(0, bar(1, 20, 30), bar(2, 40, 50, op="send")), lane(1, bar(1, 10, 30), bar(2, 40, 50))
    )
    page = page_of(drawn, "failed", "first\nsecond", [("Title", "<svg/>")])
    assert [part.partition('"')[0] for part in page.split('<tr id="')[1:]] == [
        "r1-10",
        "r0-20",
        "r0-40",
        "r1-40",
    ]
    assert '<p class="sentence">first</p>' in page
    assert "<p>failed, on 2 ranks</p>" in page
    assert "<h1>a&lt;b</h1>" in page
    assert "<h2>Title</h2>" in page
    assert page.index("</i>barrier") < page.index("</i>other")
    assert "</i>broadcast" not in page
    assert "are left out" not in page
    assert '<p class="sentence">why</p>' in page_of(replace(drawn, sentence="why"), "failed", "first")


def test_a_page_shows_the_last_64_collectives() -> None:
    drawn = timeline(lane(0, *(bar(number, number, number) for number in range(66))))
    page = page_of(drawn, "passed", "")
    assert page.count("<tr id=") == 64
    assert "2 earlier calls are left out." in page
    assert 'class="sentence"' not in page


def test_an_index_has_a_row_for_each_test() -> None:
    test = {"nodeid": "a::b", "page": "a/b.html", "outcome": "failed", "ranks": 2, "calls": 3, "ms": 1.25}
    page = index_of([test])
    assert '<td class=bad>failed<td><a href="a/b.html">a::b</a><td>2<td>3<td>1.2</tr>' in page
    assert "<h1>Timelines</h1>" in page
