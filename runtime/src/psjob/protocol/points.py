"""Words of the question by which workers meet at a point of their scripts, between a worker and shard 0."""

from __future__ import annotations

from typing import Final

ASKS: Final = "point"
MOST_NAME: Final = 200
"""Characters of a point's name."""
MOST_BYTES: Final = 16 << 20
"""Of what one worker says at a point."""
BEFORE: Final = "before attach"
"""With it begin the names of points before `attach`: all workers have passed those once rank 0 trains."""
