"""Flowcharts of the pages as SVG, without a script in the browser: the part of mermaid that the pages use, text to text.

Read are `flowchart LR` and lines of edges between `name[words<br>more words]` or `name`: `-->`, `<-->`, `-- words -->`. An edge to a node
that stands earlier in the text goes back, below the boxes. All else is a ValueError with its line.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from html import escape

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NODE = r"(\w+)(?:\[([^\]]*)\])?"
EDGE = re.compile(rf"^{NODE} (-->|<-->|-- [^>]+ -->) (?=\w)")
LETTER, LINE, PAD, BESIDE, BELOW, WRAP = 7.0, 17, 10, 56, 26, 24
"""Pixels of a letter and a line, around words, between columns and rows; and letters of the longest line."""


@dataclass(frozen=True)
class Edge:
    """An arrow; `both`: with a head at each end."""

    start: str
    end: str
    words: str
    both: bool


@dataclass(frozen=True)
class Box:
    """A node with its place: pixels of the upper left corner, of its size, and its lines."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]

    @property
    def middle(self) -> float:
        """Height of its middle."""
        return self.y + self.height / 2


def pictured(page: str) -> str:
    """The page with each flowchart as a picture."""
    return BLOCK.sub(lambda block: svg(block[1]), page)


def read(text: str) -> tuple[dict[str, str], list[Edge]]:
    """Nodes with their words in the order of the text, and edges."""
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if first != "flowchart LR":
        raise ValueError(f"{first!r} is no flowchart that hack/site/flowchart.py draws; begin with `flowchart LR`")
    nodes: dict[str, str] = {}
    edges: list[Edge] = []
    for line in lines:
        rest, before, arrow = line, "", ""
        while rest:
            found = EDGE.match(rest) or re.fullmatch(NODE, rest)
            if found is None:
                raise ValueError(f"{line!r} is no edge that hack/site/flowchart.py draws; write `a[words] --> b[words]`")
            name = found[1]
            nodes[name] = found[2] or nodes.get(name, name)
            if before:
                edges.append(Edge(before, name, arrow.strip("<-> "), arrow.startswith("<")))
            before, arrow = name, found[3] if found.re is EDGE else ""
            rest = rest[found.end() :]
    return nodes, edges


def placed(nodes: dict[str, str], edges: list[Edge]) -> dict[str, Box]:
    """Columns from left to right: a node is one to the right of the last that leads to it. Rows are in the order of the text."""
    order = list(nodes)
    column = dict.fromkeys(order, 0)
    for name in order:
        ahead = [edge for edge in edges if edge.end == name and order.index(edge.start) < order.index(name)]
        column[name] = max((column[edge.start] + 1 for edge in ahead), default=0)
    found: dict[str, Box] = {}
    x = float(PAD)
    for number in range(max(column.values()) + 1):
        here = [name for name in order if column[name] == number]
        lines = {name: tuple(piece for part in nodes[name].split("<br>") for piece in textwrap.wrap(part, WRAP)) for name in here}
        width = max(len(line) for name in here for line in lines[name]) * LETTER + 2 * PAD
        y = float(PAD)
        for name in here:
            height = len(lines[name]) * LINE + 2 * PAD
            found[name] = Box(x, y, width, height, lines[name])
            y += height + BELOW
        x += width + BESIDE
    return found


def svg(text: str) -> str:
    """The picture as one line of HTML, in the colours of the page around it. Its label names every arrow."""
    nodes, edges = read(text)
    boxes, order = placed(nodes, edges), list(nodes)
    width = max(box.x + box.width for box in boxes.values()) + 2 * PAD
    floor = max(box.y + box.height for box in boxes.values())
    parts, back = [], 0
    for edge in edges:
        here, there = boxes[edge.start], boxes[edge.end]
        if order.index(edge.end) > order.index(edge.start):
            x, y, to, level = here.x + here.width, here.middle, there.x, there.middle
            bend = (to - x) / 2
            way, at = f"M{x:g} {y:g}C{x + bend:g} {y:g} {to - bend:g} {level:g} {to - 1:g} {level:g}", ((x + to) / 2, (y + level) / 2 - 4)
        else:
            back += 1
            x, to, low = here.x + here.width / 2 + 8 * back, there.x + there.width / 2 + 8 * back, floor + BELOW * back
            begin = f"M{x:g} {here.y + here.height:g}"
            if any(other.x == here.x and other.y > here.y for other in boxes.values()):  # round the boxes below it
                x = here.x + here.width + PAD
                begin = f"M{here.x + here.width:g} {here.middle:g}H{x:g}"
            way, at = f"{begin}V{low:g}H{to:g}V{there.y + there.height + 1:g}", ((x + to) / 2, low - 4)
        tail = ' marker-start="url(#head)"' if edge.both else ""
        parts.append(f'<path d="{way}" fill="none" stroke="currentColor" marker-end="url(#head)"{tail}/>')
        if edge.words:
            parts.append(_words(edge.words, *at))
    for box in boxes.values():
        size = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        parts.append(f'<rect {size} rx="4" fill="none" stroke="currentColor"/>')
        parts += [_words(line, box.x + box.width / 2, box.y + PAD + LINE * (at + 0.75)) for at, line in enumerate(box.lines)]
    label = "; ".join(f"{edge.start} {'and' if edge.both else 'to'} {edge.end}{f': {edge.words}' if edge.words else ''}" for edge in edges)
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
        '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
    )
    size = f'viewBox="0 0 {width:g} {floor + BELOW * back + PAD:g}" style="min-width:{width * 0.6:g}px"'
    return f'<div class="flowchart" tabindex="0"><svg {size} role="img" aria-label="{escape(label)}">{head}{"".join(parts)}</svg></div>'


def _words(text: str, x: float, y: float) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="13" fill="currentColor">{escape(text)}</text>'
