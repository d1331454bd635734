"""The Kubernetes operator of psjob: the manifest, the plan, and what carries it out."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
"""Also the tag of both images and the chart's appVersion."""
