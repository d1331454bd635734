"""A comparison as one HTML page that needs nothing else, and as a table of text.

Its plots are SVG in the page: their colours of text and lines are the page's.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from html import escape as as_html
from typing import TYPE_CHECKING, Any

from psjob_client.compare.outcome import DIVERGED, LOSS, NOT_LEARNED, STEPS, Comparison, SideOutcome, smooth, verdict_sentences
from psjob_client.problems import BadInput
from psjob_operator.printable import LINE_ENDS, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
INK, LINE = "#010203", "#040506"
"""Stand for the page's colours until the text is there."""
PLOT_STYLE: dict[Any, Any] = {
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


def must_have_matplotlib() -> None:
    """Raises BadInput if the library that draws is not there."""
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
    if any(one.staleness_histogram for one in sides):
        found.append(Plot("staleness of the pushes that count", _svg(len(found), lambda axes: _staleness(axes, sides))))
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


def _staleness(axes: Axes, sides: Sequence[SideOutcome]) -> None:
    rows = [(one, dict(one.staleness_histogram)) for one in sides if one.staleness_histogram]
    if any(one.mean_staleness is not None for one, _ in rows):
        bounds = _bounds(rows)
        used = [place for place, bound in enumerate(bounds) if any(pushes.get(bound) for _, pushes in rows)]
        bounds = bounds[: used[-1] + 1]
        _buckets(axes, sides, rows, bounds, [_whole_numbers_of(bounds, place) for place in range(len(bounds))])
    else:
        for place, (one, pushes) in enumerate(rows):
            _bars(axes, sides, one, place, len(rows), [bound or 0 for bound in pushes], list(pushes.values()))
        _whole_numbers(axes)
    axes.set_xlabel("staleness (updates between the weights used and the update)")


def _whole_numbers_of(bounds: Sequence[float | None], place: int) -> str:
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

    with rc_context({**PLOT_STYLE, "svg.hashsalt": f"psjob-{number}"}):
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


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --paper: #fcfcfd; --card: #ffffff; --line: #d9dee5;
  --best: #0b7a4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --paper: #12161c; --card: #1a2028; --line: #333c48;
    --best: #4cc38a; --bad: #ff8a80; }
}
body { margin: 0 auto; max-width: 74rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
p.lead, figcaption, dt, p.note { color: var(--soft); } p { margin: .25rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } td { white-space: nowrap; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; } td.good { color: var(--best); }
p.judged { font-size: 1.2rem; font-weight: 600; margin: .75rem 0; }
.swatch { width: 22px; height: 8px; margin-right: .4rem; vertical-align: 2px; }
td.best { color: var(--best); font-weight: 700; } td.bad { color: var(--bad); font-weight: 700; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
figure svg { width: 100%; height: auto; } figcaption { font-size: .95rem; padding-bottom: .25rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; overflow-x: auto; font-size: .85rem; }
@media (max-width: 600px) {
  body { padding: 1rem .75rem 2rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; }
  .scroll table, .scroll tbody { display: block; } .scroll thead { display: none; }
  .scroll tr { display: block; border: 1px solid var(--line); border-radius: .5rem; margin-bottom: .75rem; padding: .35rem .75rem; }
  .scroll td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .15rem 0; white-space: normal;
    text-align: right !important; overflow-wrap: anywhere; }
  .scroll td::before { content: attr(data-head); color: var(--soft); font-weight: 600; }
  .scroll td:first-child { display: block; text-align: left !important; font-weight: 700; font-size: 1.1rem; }
  .scroll td:first-child::before { content: none; }
  figure svg { min-width: 0; } figure svg text { font-size: 15px; }
}
"""


EXPLAINED = {
    "verdict": "learned: the smoothed loss fell. not learned: it stayed. diverged: it rose, or was NaN or inf.",
    "rate": "Steps of a worker in a second; updates in backup, softsync and threshold. "
    "Simulated: in the time that a step takes on average; 1 is a worker that never waits.",
    "elapsed": "From when the first worker trains to the last step.",
    "target": "When the smoothed loss first came down to the loss that all sides reached which have learned, or that --loss names.",
    "final": "The last value that the script reported; with --repeat the mean of the runs ± their standard deviation.",
    "staleness": "Updates between a gradient's weights and its own update. Mean of all pushes; in sync it is the delay, 0 by default.",
    "idle": "The part of a worker's time in which its script waited for other workers, shards and the network. "
    "In sync it is the price of equal steps.",
    "dropped": "The part of the pushes that the mode left out.",
}
"""What each column means, by its key."""


@dataclass(frozen=True)
class Column:
    """A column of the table. `best` picks the best value, None: there is no best."""

    key: str
    """Of EXPLAINED."""
    head: str
    value: Callable[[SideOutcome], float | None]
    show: str = "{:.3g}"
    best: Callable[[Sequence[float]], float] | None = None
    spread: Callable[[SideOutcome], float | None] = lambda one: None
    """The standard deviation over the runs of a side."""


def report_columns(comparison: Comparison) -> list[Column]:
    """Those that at least one side has a number for."""
    unit, target = comparison.unit, comparison.target
    metrics = list(dict.fromkeys(name for one in comparison.sides for name in one.final))
    metrics.sort(key=lambda name: name != LOSS)
    every = [
        Column("target", f"time to loss {target:.3g} ({unit})" if target is not None else "", comparison.time_to, best=min),
        Column("elapsed", f"whole time ({unit})", lambda one: one.elapsed or None, best=min),
        Column("rate", "steps/s" if unit == "s" else "relative speed", lambda one: one.rate, best=max),
        *(_metric(name) for name in metrics),
        Column("staleness", "mean staleness", lambda one: one.staleness, "{:.2f}"),
        Column("idle", "waiting (%)", lambda one: None if one.waiting is None else 100 * one.waiting, "{:.1f}"),
        Column("dropped", "dropped (%)", lambda one: None if one.dropped is None else 100 * one.dropped, "{:.1f}"),
    ]
    return [column for column in every if any(column.value(one) is not None for one in comparison.sides)]


def _metric(name: str) -> Column:
    best = min if name == LOSS else max if "acc" in name or "auc" in name else None
    return Column(
        "final", f"last {name.replace('_', ' ')}", lambda one: one.final.get(name), "{:.4g}", best, lambda one: one.spread.get(name)
    )


def report_rows(comparison: Comparison) -> list[list[str]]:
    """The table as words, its head first."""
    table = report_columns(comparison)
    return [
        ["side", "verdict", *(column.head for column in table)],
        *([one.title, one.verdict or "–", *(_cell(one, column) for column in table)] for one in comparison.sides),
    ]


def explained(comparison: Comparison) -> list[dict[str, str]]:
    """What each column of its table means, by the column's head."""
    heads = {"verdict": "verdict"} | {column.key: column.head for column in reversed(report_columns(comparison))}
    order = ["verdict", *dict.fromkeys(column.key for column in report_columns(comparison))]
    return [{"name": "last …" if key == "final" else heads[key], "words": EXPLAINED[key]} for key in order]


def best(comparison: Comparison) -> list[list[int]]:
    """[row, column] of each cell of `rows` below its head that is the best of its column."""
    found = (_best_of(column, comparison) for column in report_columns(comparison))
    return [[row, at] for at, rows_of in enumerate(found, 2) for row in rows_of]


def escape(text: str) -> str:
    """Text of others in HTML: neither markup nor what acts where the page is read as text."""
    return as_html(printable(text, LINE_ENDS))


def page(comparison: Comparison) -> str:
    """The whole report."""
    sides = comparison.sides
    failed = [f"<p class=note><b>{escape(one.title)}</b>: {escape(one.result)}</p>" for one in sides if one.result != "Complete"]
    failed += [f"<p class=note><b>{escape(one.title)}</b>: {escape(words)}</p>" for one in sides for words in one.warnings]
    figures = [f"<figure><figcaption>{escape(plot.title)}</figcaption>{plot.svg}</figure>" for plot in plots(comparison)]
    few = "" if len(sides) <= MOST_BARS else f"<p class=note>Bars of staleness and waiting are drawn for at most {MOST_BARS} sides.</p>"
    meant = "".join(f"<dt>{escape(one['name'])}</dt><dd>{escape(one['words'])}</dd>" for one in explained(comparison))
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in comparison.about.items())
    commands = "".join(f"<dt>{escape(one.title)}</dt><dd><code>{escape(one.command)}</code></dd>" for one in sides)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(comparison.name)}: {escape(_titles(sides))}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(comparison.name)}</h1><p class=lead>{escape(_titles(sides))}</p>",
            *([f"<p class=judged>{escape(words)}</p>"] if (words := verdict_sentences(comparison)) else []),
            f"<h2>Result</h2><div class=scroll tabindex=0 role=region aria-label=Result>{_table(comparison)}</div>",
            *failed,
            f"<details><summary>What the columns mean</summary><dl>{meant}</dl></details>",
            *([f"<h2>Plots</h2>{few}<div class=plots>{''.join(figures)}</div>"] if figures else []),
            f"<h2>How it was run</h2><dl>{about}{commands}</dl>",
            f"<pre tabindex=0 role=region aria-label=Manifest>{escape(comparison.manifest)}</pre>",
            "</main></body></html>\n",
        )
    )


def _titles(sides: Sequence[SideOutcome]) -> str:
    named = [one.title for one in sides[:MOST_BARS]]
    return " · ".join(named + ([f"{len(sides) - MOST_BARS} more"] if len(sides) > MOST_BARS else []))


def _table(comparison: Comparison) -> str:
    table, picked = report_columns(comparison), {(row, at) for row, at in best(comparison)}
    head = "".join(f"<th>{escape(column.head)}</th>" for column in table)
    body = "".join(f"<tr>{_row(number, one, table, picked)}</tr>" for number, one in enumerate(comparison.sides))
    return f"<table><thead><tr><th>side</th><th>verdict</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(number: int, one: SideOutcome, table: Sequence[Column], picked: Set[tuple[int, int]]) -> str:
    bad = "bad" if one.verdict in (DIVERGED, NOT_LEARNED) else "good" if one.verdict else ""
    cells = [(bad, "verdict", one.verdict or "–")]
    cells += [("best" if (number, at) in picked else "", column.head, _cell(one, column)) for at, column in enumerate(table, 2)]
    rest = "".join(f'<td data-head="{escape(head)}"{f" class={kind}" if kind else ""}>{escape(words)}</td>' for kind, head, words in cells)
    return f'<td data-head="side">{swatch(number)}{escape(one.title)}</td>{rest}'


def _best_of(column: Column, comparison: Comparison) -> list[int]:
    """Sides with the best value. What has not learned is the best in nothing, and where all the others are equal there is no best."""
    able = [(row, side) for row, side in enumerate(comparison.sides) if side.verdict not in (DIVERGED, NOT_LEARNED)]
    values = {row: value for row, side in able if (value := column.value(side)) is not None}
    if column.best is None or len(set(values.values())) < 2:
        return []
    wanted = column.best(list(values.values()))
    return [row for row, value in values.items() if value == wanted]


def _cell(one: SideOutcome, column: Column) -> str:
    value = column.value(one)
    if value is None:
        return "–"
    spread = column.spread(one)
    shown = f"{value:,.0f}" if abs(value) >= 1000 else column.show.format(value)
    return shown if spread is None else f"{shown} ± {spread:.2g}"
