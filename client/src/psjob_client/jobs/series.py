"""Numbers over time: folded from lines {"time", "step", "rate", "metrics"}, as local/sampling.py writes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from psjob_client.jobs.told import finite
from psjob_client.jobs.view import HistoryView, Series
from psjob_client.local.probe import part

FIRST = ("loss", "rate")


def history(lines: Iterable[Mapping[str, Any]], *, complete: bool = True) -> HistoryView:
    """One series a name. A value that was not told anew is not repeated; `rate` has a point a line."""
    curves: dict[str, tuple[list[float], list[int], list[float]]] = {name: ([], [], []) for name in FIRST}
    for line in lines:
        at, step = finite(line.get("time")), finite(line.get("step"))
        if at is None or step is None:
            continue
        told = part(line, "metrics")
        for name, raw in (("rate", line.get("rate")), *told.items()):
            value = finite(raw)
            if value is None:
                continue
            times, steps, values = curves.setdefault(str(name), ([], [], []))
            if name != "rate" and steps and steps[-1] == int(step):
                continue
            times.append(at)
            steps.append(int(step))
            values.append(value)
    found = [Series(name=name, times=tuple(t), steps=tuple(s), values=tuple(v)) for name, (t, s, v) in curves.items() if v]
    return HistoryView(series=tuple(found), complete=complete)
