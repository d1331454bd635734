"""The map of the house as a picture: which packages there are, and which imports which, read from the code by grimp.

A box is a package or a module directly in one of the three distributions. An arrow that follows from others is left out. Pure rooms are
those that pyproject.toml's import contracts keep from I/O. `python -m hack.housemap` prints the picture; `make generate` writes it.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable
from html import escape
from pathlib import Path

import grimp

from hack.layers import Layout, laid_out, needed

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("psjob_client", "psjob_operator", "psjob")
FACE = "psjob"
"""The one package whose own names people import; of the others the root is a version number, and no room."""
NAMED = ("psjob_client", "psjob.integrations")
"""What the face only names, for type checkers: it imports none of these."""
PURE = "without I/O"
"""What the names of the contracts say that keep rooms pure."""
ROADS = {
    1: {f"psjob_operator.{room}" for room in ("api", "plan", "render", "cluster")} | {"psjob_client.local"},
    2: {f"psjob.{room}" for room in ("worker", "wire", "shard", "modes", "rules")},
}
"""The rooms of the two roads: manifest to process, gradient to reply."""
WIDTH, LEFT, MARGIN, ROW, HIGH, HEAD, GAP = 1000, 470, 14, 62, 32, 58, 36
STYLE = """
:root { --paper: #ffffff; --frame: #f4f5f8; --ink: #1c2330; --soft: #5b6575; --line: #8a94a6; --box: #ffffff; --pure: #dfeaff;
  --one: #b4540a; --two: #1667c0; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --frame: #1b212b; --ink: #e8ecf2; --soft: #a7b1c0; --line: #79859a;
  --box: #232b37; --pure: #243a5e; --one: #f2a35e; --two: #7fb8ff; } }
text { font-family: system-ui, sans-serif; fill: var(--ink); } .paper { fill: var(--paper); } .frame { fill: var(--frame); }
.title { font-size: 15px; font-weight: 600; } .note { font-size: 12px; fill: var(--soft); } .name { font-size: 12.5px; }
.box { fill: var(--box); stroke: var(--line); } .pure { fill: var(--pure); }
.road1 { stroke: var(--one); stroke-width: 2.5; } .road2 { stroke: var(--two); stroke-width: 2.5; }
.arrow { fill: none; stroke: var(--line); stroke-width: 1.2; } .tip { fill: var(--line); }
"""


def house() -> dict[str, set[str]]:
    """The rooms of the house as the code has it, and what each imports."""
    graph = grimp.build_graph(*DISTRIBUTIONS, cache_dir=None)
    imports: dict[str, set[str]] = {}
    for module in sorted(graph.modules):
        room = room_of(module)
        if room is None:
            continue
        found = graph.find_modules_directly_imported_by(module)
        targets = {room_of(target) for target in found if module != FACE or not target.startswith(NAMED)}
        imports.setdefault(room, set()).update(target for target in targets if target is not None and target != room)
    return imports


def room_of(module: str) -> str | None:
    """The room that a module lies in; None for the roots that are a version number alone."""
    parts = module.split(".")
    if len(parts) > 1:
        return ".".join(parts[:2])
    return module if module == FACE else None


def pure_rooms() -> set[str]:
    """Whole packages that the import contracts keep from I/O, clock and chance."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {name for contract in contracts if PURE in contract["name"] for name in contract["source_modules"] if name.count(".") == 1}


def picture() -> str:
    """The map as SVG."""
    drawn = needed(house())
    left = {name: targets for name, targets in drawn.items() if _distribution(name) != "psjob"}
    right = {name: targets for name, targets in drawn.items() if _distribution(name) == "psjob"}
    ground = dict.fromkeys(left, 0)
    operator = laid_out({name: targets for name, targets in left.items() if _distribution(name) == "psjob_operator"}, {}).layers
    ground |= {name: operator for name in left if _distribution(name) == "psjob_client"}
    first, second = laid_out(left, ground), laid_out(right, {})
    bottom = HEAD + max(first.layers + 1, second.layers) * ROW + MARGIN
    # Below the client's rows is a gap, in which the operator's frame and title begin.
    clients, step = first.layers - operator, (bottom - HEAD - 2 * GAP) / first.layers
    edge = HEAD + GAP / 2 + clients * step + 8
    parts = [
        _frame(MARGIN, HEAD, LEFT, edge - HEAD, "psjob-client"),
        _frame(MARGIN, edge + 8, LEFT, bottom - edge - 8, "psjob-operator"),
        _frame(LEFT + 2 * MARGIN, HEAD, WIDTH - LEFT - 3 * MARGIN, bottom - HEAD, "psjob, the runtime"),
    ]
    pure = pure_rooms()
    tall = (bottom - HEAD - GAP) / second.layers
    parts += _drawn(first, pure, MARGIN, LEFT, lambda row: HEAD + GAP * (1.5 if row >= clients else 0.7) + (row + 0.5) * step)
    parts += _drawn(second, pure, LEFT + 2 * MARGIN, WIDTH - LEFT - 3 * MARGIN, lambda row: HEAD + GAP * 0.8 + (row + 0.5) * tall)
    return "\n".join(_around(bottom + 44, parts)) + "\n"


def _around(height: float, parts: list[str]) -> list[str]:
    legend = [
        f'<text class="title" x="{MARGIN}" y="24">The house: packages and what they import</text>',
        f'<text class="note" x="{MARGIN}" y="44">An arrow leads from a package to one that it imports. Arrows that follow from others '
        "are left out.</text>",
    ]
    y = height - 20
    marks = (("pure", "pure: no I/O, clock or chance"), ("road1", "road 1: manifest to process"), ("road2", "road 2: gradient to reply"))
    for number, (kind, words) in enumerate(marks):
        x = MARGIN + 4 + number * 260
        legend.append(f'<rect class="box {kind}" x="{x}" y="{y - 12}" width="26" height="16" rx="4"/>')
        legend.append(f'<text class="note" x="{x + 34}" y="{y}">{words}</text>')
    return [
        "<!-- generated by `make generate` from the imports; do not edit -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img">',
        "<title>The packages of psjob and what they import</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0.8 L8 4 L0 7.2 z"/></marker></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>',
        *legend,
        *parts,
        "</svg>",
    ]


def _drawn(layout: Layout, pure: set[str], x: float, width: float, y_of: Callable[[int], float]) -> list[str]:
    def place(point: tuple[float, int]) -> tuple[float, float]:
        return x + 6 + point[0] * (width - 12), y_of(point[1])

    arrows = [_arrow([place(point) for point in points]) for points in layout.paths.values()]
    return [*arrows, *(_box(name, pure, *place(point)) for name, point in layout.boxes.items())]


def _frame(x: float, y: float, width: float, height: float, title: str) -> str:
    return (
        f'<rect class="frame" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8"/>'
        f'<text class="note" x="{x + 10:.0f}" y="{y + 18:.0f}">{escape(title)}</text>'
    )


def _box(name: str, pure: set[str], x: float, y: float) -> str:
    kinds = ["box", *(["pure"] if name in pure else []), *(f"road{road}" for road, rooms in ROADS.items() if name in rooms)]
    word = name.partition(".")[2] or name
    wide = 7 * len(word) + 24
    return (
        f'<rect class="{" ".join(kinds)}" x="{x - wide / 2:.1f}" y="{y - HIGH / 2:.1f}" width="{wide:.1f}" height="{HIGH}" rx="5"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" class="name">{escape(word)}</text>'
    )


def _arrow(points: list[tuple[float, float]]) -> str:
    """A smooth line through the points, from below the first box to above the last."""
    (x, y), last = points[0], points[-1]
    ends = [(x, y + HIGH / 2), *points[1:-1], (last[0], last[1] - HIGH / 2 - 1)]
    path = [f"M{ends[0][0]:.1f} {ends[0][1]:.1f}"]
    for (x, y), (to_x, to_y) in itertools.pairwise(ends):
        bend = (to_y - y) / 2
        path.append(f"C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}")
    return f'<path class="arrow" d="{" ".join(path)}" marker-end="url(#tip)"/>'


def _distribution(name: str) -> str:
    return name.partition(".")[0]


if __name__ == "__main__":
    print(picture(), end="")
