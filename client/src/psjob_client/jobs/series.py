"""Numbers over time: folded from lines {"time", "step", "rate", "metrics", "reported"}, as local/record.py writes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from psjob_client.jobs.told import finite
from psjob_client.jobs.view import HistoryView, Series
from psjob_client.local.status import part, reports

FIRST = ("loss", "rate")
Line = TypeVar("Line")


def thinned(lines: Sequence[Line], most: int | None) -> Sequence[Line]:
    """At most `most` of them, evenly chosen, the last among them; None: all."""
    stride = 1 if most is None else max(1, -(-len(lines) // most))
    return lines if stride == 1 else lines[(len(lines) - 1) % stride :: stride]


def history(lines: Iterable[Mapping[str, Any]], *, complete: bool = True) -> HistoryView:
    """One series a name, a point for each report, at the step that it was made at; `rate` has a point a line.

    A line holds each number that was given last. Lines without `reported` do not say when: there each step with a line is a point.
    """
    curves: dict[str, tuple[list[float], list[int], list[float]]] = {name: ([], [], []) for name in FIRST}
    for line in lines:
        at, step = finite(line.get("time")), finite(line.get("step"))
        if at is None or step is None:
            continue
        reported = reports(line)
        for name, raw in (("rate", line.get("rate")), *part(line, "metrics").items()):
            value = finite(raw)
            if value is None:
                continue
            times, steps, values = curves.setdefault(str(name), ([], [], []))
            given = int(step) if name == "rate" else reported.get(name, int(step))
            if name != "rate" and steps and steps[-1] == given and (name not in reported or values[-1] == value):
                continue
            times.append(at)
            steps.append(given)
            values.append(value)
    found = [Series(name=name, times=tuple(t), steps=tuple(s), values=tuple(v)) for name, (t, s, v) in curves.items() if v]
    return HistoryView(series=tuple(found), complete=complete)
