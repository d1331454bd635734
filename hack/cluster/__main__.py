"""The command line: `python -m hack.cluster` from the repository's root, or `python hack/cluster` from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from hack.cluster.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
