"""What Prometheus reads at /metrics of the operator: how late the pushes of each job are, as its coordinator last told.

The text format is version 0.0.4 of Prometheus' exposition: lines of a name, labels and a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from psjob_operator.cluster.queue import Key

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_BUCKETS = 64
_METRICS = {
    "lag": "Updates between the weights that a gradient was computed on and those it is applied to, of all shards.",
    "gap": "Root mean square of what the weights have moved between, estimated on samples of all shards'.",
}


def exposition(told: Mapping[Key, Mapping[str, Any]]) -> str:
    """The page, from what shard 0 of each job said of all its shards (contract.STATUS_KEYS). A job without such pushes has no lines."""
    lines = []
    for word, help_ in _METRICS.items():
        name = f"psjob_push_{word}"
        lines += [f"# HELP {name} {help_}", f"# TYPE {name} histogram"]
        for key, status in sorted(told.items()):
            said = status.get("coordinator")
            if isinstance(said, Mapping):
                lines += _histogram(name, f'namespace="{key.namespace}",job="{key.name}"', said.get(word))
    return "\n".join(lines) + "\n"


def _histogram(name: str, labels: str, told: Any) -> Iterator[str]:
    """A pod says this: a number that is none is 0, and buckets never fall."""
    if not isinstance(told, Mapping) or not isinstance(told.get("buckets"), list):
        return
    count, held = _number(told.get("count")), 0.0
    for bucket in told["buckets"][:MOST_BUCKETS]:
        if isinstance(bucket, list) and len(bucket) == 2:
            held = min(max(held, _number(bucket[1])), count)
            yield f'{name}_bucket{{{labels},le="{_number(bucket[0]):g}"}} {held:.0f}'
    yield f'{name}_bucket{{{labels},le="+Inf"}} {count:.0f}'
    yield f"{name}_sum{{{labels}}} {_number(told.get('sum')):.17g}"
    yield f"{name}_count{{{labels}}} {count:.0f}"


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return max(0.0, float(value)) if known else 0.0
