"""The operator and the command line of psjob."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
"""Also the tag of both images and the chart's appVersion."""
