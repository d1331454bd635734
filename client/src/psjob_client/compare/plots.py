"""The plots of a comparison as SVG to be put into a page: its colours of text and lines are the page's."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psjob_client.compare.outcome import LOSS, STEPS, Comparison, SideOutcome, smooth
from psjob_client.local.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
INK, LINE = "#010203", "#040506"
"""Stand for the page's colours until the text is there."""
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11.0, "text.parse_math": False,
    "grid.color": LINE, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "lines.linewidth": 1.8,
}  # fmt: skip
LABEL_MOST = 40
MOST_BARS = 12
"""Above so many sides a figure has no legend, which the table has in its place, and there are no bars beside one another."""


@dataclass(frozen=True)
class Plot:
    """A figure for a page."""

    title: str
    svg: str


def must_be_installed() -> None:
    """Raises BadInput where the library that draws is not there."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise BadInput("psjob compare draws with matplotlib, which is not installed here: pip install matplotlib") from None


def plots(comparison: Comparison) -> list[Plot]:
    """Every plot that there are numbers for."""
    sides, unit = comparison.sides, comparison.unit
    names = list(dict.fromkeys(name for one in sides for name, curve in one.curves.items() if len(curve) > 1))
    names.sort(key=lambda name: name != LOSS)
    found: list[Plot] = []
    for name in names:
        word = name.replace("_", " ")
        for place, axis in ((1, STEPS), (0, f"time ({unit})")):
            draw = _curves(name, place, axis, comparison)
            found.append(Plot(f"{word} against {'steps' if place else 'time'}", _svg(len(found), draw)))
    if len(sides) > MOST_BARS:
        return found
    if any(one.lags for one in sides):
        found.append(Plot("staleness (lag) of the pushes that count", _svg(len(found), lambda axes: _lags(axes, sides))))
    if any(one.gaps for one in sides):
        found.append(Plot("gap of the pushes", _svg(len(found), lambda axes: _gaps(axes, sides))))
    if any(one.idle for one in sides):
        found.append(Plot("idle time of each worker", _svg(len(found), lambda axes: _idle(axes, sides))))
    return found


def _curves(name: str, place: int, axis: str, comparison: Comparison) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        values = []
        for number, one in enumerate(comparison.sides):
            curve = one.curves.get(name, ())
            points = smooth(curve) if name == LOSS else list(curve)
            if not points:
                continue
            if name == LOSS and len(comparison.sides) <= MOST_BARS:
                axes.plot([p[place] for p in curve], [p[2] for p in curve], color=_color(number), linewidth=0.8, alpha=0.3)
                values += [p[2] for p in curve]
            axes.plot([p[place] for p in points], [p[2] for p in points], color=_color(number), linestyle=_dash(number), label=_label(one))
            values += [p[2] for p in points]
        if name == LOSS and min(values) > 0 and max(values) > 10 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(axis)
        axes.set_ylabel(name.replace("_", " ") + (" (exponential mean)" if name == LOSS else ""))
        axes.set_xlim(left=0)

    return draw


def _lags(axes: Axes, sides: Sequence[SideOutcome]) -> None:
    rows = [(one, dict(one.lags)) for one in sides if one.lags]
    if any(one.mean_lag is not None for one, _ in rows):
        bounds = _bounds(rows)
        used = [place for place, bound in enumerate(bounds) if any(lags.get(bound) for _, lags in rows)]
        bounds = bounds[: used[-1] + 1]
        _buckets(axes, sides, rows, bounds, [_lags_of(bounds, place) for place in range(len(bounds))])
    else:
        for place, (one, lags) in enumerate(rows):
            _bars(axes, sides, one, place, len(rows), [lag or 0 for lag in lags], list(lags.values()))
        _whole_numbers(axes)
    axes.set_xlabel("lag (updates between the weights used and the update)")


def _lags_of(bounds: Sequence[float | None], place: int) -> str:
    """`3`, `5-6`, `≥ 1025`: the whole numbers of a bucket."""
    bound, least = bounds[place], (bounds[place - 1] or 0) + 1 if place else 0
    return f"≥ {least:g}" if bound is None else f"{bound:g}" if bound <= least else f"{least:g}-{bound:g}"


def _gaps(axes: Axes, sides: Sequence[SideOutcome]) -> None:
    rows = [(one, dict(one.gaps)) for one in sides if one.gaps]
    used = [bound for bound in _bounds(rows) if any(gaps.get(bound) for _, gaps in rows)]
    _buckets(axes, sides, rows, used, ["more" if bound is None else f"≤ {bound:.0e}" if bound else "0" for bound in used])
    axes.set_xlabel("gap (root mean square of weights updated − weights used)")


Rows = Sequence[tuple[SideOutcome, Mapping[float | None, float]]]
"""Sides, and their pushes by upper bound."""


def _bounds(rows: Rows) -> list[float | None]:
    """Of all sides, rising."""
    return sorted({bound for _, pushes in rows for bound in pushes}, key=lambda bound: math.inf if bound is None else bound)


def _buckets(axes: Axes, sides: Sequence[SideOutcome], rows: Rows, bounds: Sequence[float | None], names: Sequence[str]) -> None:
    for place, (one, pushes) in enumerate(rows):
        _bars(axes, sides, one, place, len(rows), list(range(len(bounds))), [pushes.get(bound, 0) for bound in bounds])
    axes.set_xticks(range(len(bounds)), names, rotation=45, ha="right")


def _idle(axes: Axes, sides: Sequence[SideOutcome]) -> None:
    rows = [one for one in sides if one.idle]
    for place, one in enumerate(rows):
        _bars(axes, sides, one, place, len(rows), list(range(len(one.idle))), list(one.idle), 1.0)
    _whole_numbers(axes)
    axes.set_xlabel("worker")
    axes.set_ylabel("time waited (%)")
    axes.set_ylim(0, 100)


def _bars(
    axes: Axes, sides: Sequence[SideOutcome], one: SideOutcome, place: int, rows: int, at: Sequence[float], values: Sequence[float],
    whole: float | None = None,
) -> None:  # fmt: skip
    """One side's bars beside those of `rows` sides, in per cent of `whole`, or of their sum."""
    width, whole = 0.8 / rows, whole or sum(values) or 1.0
    places = [x - 0.4 + width * (place + 0.5) for x in at]
    axes.set_ylabel("pushes (%)")
    axes.bar(places, [100 * value / whole for value in values], width, color=_color(list(sides).index(one)), label=_label(one))


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _dash(number: int) -> Any:
    """Another one for the sides that share a colour."""
    return DASHES[number // len(COLORS) % len(DASHES)]


def swatch(number: int) -> str:
    """How the curve of side `number` looks, for a table."""
    dash = _dash(number)
    dashes = "" if dash == "-" else f' stroke-dasharray="{" ".join(f"{3 * length:g}" for length in dash[1])}"'
    line = f'<line x1="0" y1="4" x2="22" y2="4" stroke="{_color(number)}" stroke-width="3"{dashes}/>'
    return f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">{line}</svg>'


def _label(one: SideOutcome) -> str:
    return one.title.lstrip("_")[:LABEL_MOST]  # which would keep it out of the legend


def _svg(number: int, draw: Callable[[Axes], None]) -> str:
    """A figure as an `<svg>` element that names nothing outside itself, with ids that no other figure of the page has."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "svg.hashsalt": f"psjob-{number}"}):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(axis="y", linewidth=0.7)
        if len(axes.get_legend_handles_labels()[1]) <= MOST_BARS:
            axes.legend(frameon=False, fontsize=10)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(LINE, "var(--line)")
    # Names of groups, which are the same in every figure.
    return re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL))
