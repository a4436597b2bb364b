"""Compilations of a rank: frames, graph breaks, recompilations; and where those of ranks first differ.

Used on both sides; standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DISAGREE = "ranks disagree on what they compiled"
"""Beginning of the message of a test in which they do."""
MOST_FRAMES = 60
"""Number of frames of a rank that a report lists."""
_DEVICE = re.compile(r"\b(cuda|xpu|npu|mps|privateuseone):\d+")
_SIZE = re.compile(r', (s\d+): "Sym\(\1\)"')
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_ID = re.compile(r"\b\d{9,}\b")


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place at which dynamo could not continue a graph.

    Attributes:
        line: `file:line` of the user's code, of torch's where no line of the user is known.
        reason: torch's reason, in one line.
    """

    line: str
    reason: str

    def __str__(self) -> str:
        return f"graph break at {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One compilation of the frame of one function.

    Attributes:
        function: name of the function, "forward" say.
        line: `file:line` of its definition.
        number: torch's number of the frame and of the compilation of that frame, "0/1" say.
        ops: number of operations in its graph; 0 if it has none.
        graph: the graph as torch writes it, without numbers of devices; empty if there is none.
        breaks: graph breaks that were met while it was traced.
        recompiled: the guard that failed, where the frame had been compiled before; else empty.
        caches: what torch's caches had for it: "FX graph: miss", "AOT autograd: hit".
        failed: why it runs uncompiled, in one line; empty if it does not.
        seconds: seconds that it took, backward included.
    """

    function: str
    line: str
    number: str
    ops: int = 0
    graph: tuple[str, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    recompiled: str = ""
    caches: tuple[str, ...] = ()
    failed: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.function} ({self.line})"

    def words(self) -> str:
        """Describe it in one line, without the seconds."""
        words = [f"{self.ops} operation{'' if self.ops == 1 else 's'}" if self.graph else "no graph"]
        words += [f"recompiled, as {self.recompiled}"] if self.recompiled else []
        words += list(self.caches)
        words += [f"runs uncompiled: {self.failed}"] if self.failed else []
        return f"{self}: {'; '.join(words)}"


def graph_lines(text: str) -> tuple[str, ...]:
    """Return a graph that torch has written as lines that are the same on ranks with the same graph.

    A size that no operation uses is left out: the storage offset of a rank's slice of a batch is one.
    """
    text = _DEVICE.sub(r"\1", text)
    text = _SIZE.sub(lambda size: size[0] if len(re.findall(rf"\b{size[1]}\b", text)) > 2 else "", text)
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())


def without_addresses(text: str) -> str:
    """Return a text of torch's without addresses and ids of objects: ranks have others."""
    return _ID.sub("...", _ADDRESS.sub("", text))


def in_one_line(text: str) -> str:
    """Return the first line of an explanation, with what follows `Explanation:`."""
    text = without_addresses(text)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if lines and lines[0].startswith("Encountered graph break when attempting to trace"):
        lines = lines[1:]
    if not lines:
        return "torch gives no reason"
    found = (line.partition("Explanation:")[2].strip() for line in lines[1:] if "Explanation:" in line)
    explanation = next(found, "")
    return f"{lines[0]}: {explanation}" if explanation else lines[0]


def distinct_breaks(frames: Iterable[Frame]) -> tuple[GraphBreak, ...]:
    """Return the graph breaks of frames, each once: a break is met again in each frame around it."""
    return tuple(dict.fromkeys(each for frame in frames for each in frame.breaks))


def first_difference(by_rank: Mapping[int, Sequence[Frame]]) -> str:
    """Return a sentence about the first thing that ranks have compiled differently; empty if there is none.

    Args:
        by_rank: the frames of each rank, in the order of their compilation.
    """
    for place in range(max(map(len, by_rank.values()), default=0)):
        frames = {rank: _at(frames, place) for rank, frames in by_rank.items()}
        for aspect in _ASPECTS:
            if found := aspect(frames):
                return f"compilation {place + 1}: {found}"
    return ""


def _at(frames: Sequence[Frame], place: int) -> Frame | None:
    return frames[place] if place < len(frames) else None


def _same_frame(frames: Mapping[int, Frame | None]) -> str:
    texts = {
        rank: "nothing" if frame is None else f"{frame}{_because(frame)}" for rank, frame in frames.items()
    }
    named = {rank: "" if frame is None else str(frame) for rank, frame in frames.items()}
    return _parted(named, {rank: f"compiled {text}" for rank, text in texts.items()})


def _because(frame: Frame) -> str:
    return f" again, as {frame.recompiled}" if frame.recompiled else ""


def _same_reason(frames: Mapping[int, Frame | None]) -> str:
    texts = {rank: frame.recompiled for rank, frame in frames.items() if frame}
    words = {
        rank: f"compiled it again, as {text}" if text else "compiled it for the first time"
        for rank, text in texts.items()
    }
    return _of(frames, _parted(texts, words))


def _same_breaks(frames: Mapping[int, Frame | None]) -> str:
    of_rank = {rank: frame.breaks for rank, frame in frames.items() if frame}
    texts = {rank: "; ".join(map(str, breaks)) for rank, breaks in of_rank.items()}
    return _of(frames, _parted(texts, {rank: text or "no graph break" for rank, text in texts.items()}))


def _same_graph(frames: Mapping[int, Frame | None]) -> str:
    graphs = {rank: frame.graph for rank, frame in frames.items() if frame}
    place = first_parting(list(graphs.values()))
    if place is None:
        return ""
    texts = {
        rank: f"`{graph[place].strip()}`" if place < len(graph) else "a shorter graph"
        for rank, graph in graphs.items()
    }
    return _of(frames, f"the graphs differ: {_parted(texts, texts)}")


def _same_caches(frames: Mapping[int, Frame | None]) -> str:
    texts = {rank: ", ".join(frame.caches) for rank, frame in frames.items() if frame}
    return _of(frames, _parted(texts, {rank: text or "no cache asked" for rank, text in texts.items()}))


def _same_failure(frames: Mapping[int, Frame | None]) -> str:
    texts = {rank: frame.failed for rank, frame in frames.items() if frame}
    words = {rank: f"runs it uncompiled: {text}" if text else "compiled it" for rank, text in texts.items()}
    return _of(frames, _parted(texts, words))


_ASPECTS = (_same_frame, _same_reason, _same_breaks, _same_graph, _same_failure, _same_caches)


def first_parting(graphs: Sequence[Sequence[str]]) -> int | None:
    """Return the number of the first line in which graphs differ; None if they are the same."""
    first, *others = graphs
    for place in range(max(map(len, graphs))):
        line = first[place : place + 1]
        if any(other[place : place + 1] != line for other in others):
            return place
    return None


def _of(frames: Mapping[int, Frame | None], difference: str) -> str:
    frame = next(frame for frame in frames.values() if frame is not None)
    return f"{frame}: {difference}" if difference else ""


def _parted(keys: Mapping[int, object], texts: Mapping[int, str]) -> str:
    """Say what each rank has, ranks with the same together, if they do not all have the same."""
    groups: dict[object, list[int]] = {}
    for rank, key in keys.items():
        groups.setdefault(key, []).append(rank)
    if len(groups) < 2:
        return ""
    return "; ".join(f"{_named(ranks)} {texts[ranks[0]]}" for ranks in groups.values())


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (" and more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def described(by_rank: Mapping[int, Sequence[Frame]]) -> str:
    """Return the lines of a report on what ranks have compiled, those of ranks with the same together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, frames in by_rank.items():
        key = tuple((frame.words(), frame.breaks, frame.graph) for frame in frames)
        groups.setdefault(key, []).append(rank)
    lines: list[str] = []
    for ranks in groups.values():
        frames = by_rank[ranks[0]]
        who = "all ranks" if len(groups) == 1 and len(by_rank) > 1 else _named(ranks)
        seconds = sum(frame.seconds for frame in frames)
        number = f"{len(frames)} frame{'' if len(frames) == 1 else 's'}"
        lines.append(f"{who}: {number}, {seconds:.1f} s{' on each' if len(ranks) > 1 else ''}")
        for frame in frames[:MOST_FRAMES]:
            lines.append(f"  {frame.words()}")
        lines += [f"  and {len(frames) - MOST_FRAMES} more"] if len(frames) > MOST_FRAMES else []
        lines += [f"  {each}" for each in distinct_breaks(frames)]
    return "\n".join(lines)
