"""docs/metrics.md: the text of hack/metrics.md around a table made of the operator's one list of metrics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from psjob_operator.cluster import metrics
from psjob_operator.cluster.metrics import Metric

SOURCE = Path(__file__).with_name("metrics.md")
GROUPS = {
    "operator": metrics.OF_OPERATOR,
    "jobs": metrics.OF_ALL_JOBS,
    "job": metrics.OF_A_JOB,
    "told": metrics.TOLD_BY_SHARD_0,
}


def page() -> str:
    """The page as Markdown, the same on every call. Raises KeyError if the text asks for a table that is not there."""
    parts = []
    for line in SOURCE.read_text().splitlines():
        word = line.removeprefix("{{table ").removesuffix("}}")
        parts.append(table(GROUPS[word]) if word != line else line)
    return "\n".join(parts) + "\n"


def table(rows: Iterable[Metric]) -> str:
    """One row a metric."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in rows:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        edges = f" Buckets {metric.buckets[0]:g} to {metric.buckets[-1]:g}." if metric.buckets else ""
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{edges} |")
    return "\n".join(lines)
