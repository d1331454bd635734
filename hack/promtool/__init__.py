"""Prometheus' own tool for rules, which evaluates the chart's alerts over series in tests."""

from __future__ import annotations

from pathlib import Path

from hack.cluster.build import find_go
from hack.gotool import GoTool

TOOL = GoTool(
    "promtool",
    "github.com/prometheus/prometheus/cmd/promtool",
    Path(__file__).resolve().parent / "module",
    "which evaluates rules of Prometheus, once (some minutes)",
    # Without the clients of clouds, which no rule needs and which take most of the time.
    tags="remove_all_sd,netgo",
)


def promtool() -> Path:
    """The program. Raises Unavailable if Go is missing, ClusterError where it cannot be built."""
    return TOOL.built(find_go)
