"""The scripts of this folder, as they are and with plain loops and variables."""

from __future__ import annotations

from pathlib import Path

from tests.scripts.cells import scripts_of

HERE = Path(__file__).parent / "scripts"
FRAMEWORKS = ("accelerated", "lit", "trainer")
"""Those whose loop is, or passes through, a library's."""
SENTENCES = ("the script ended before it stood where it was", "nobody keeps it", "draws other batches", "is made anew in this start")
"""Why a script with a plain loop is not Complete."""


def scripts() -> dict[str, str]:
    """All of them, by name."""
    cells = {name: script.text for name, script in scripts_of(HERE / "loops.py").items()}
    return dict(sorted((cells | {name: (HERE / f"{name}.py").read_text() for name in FRAMEWORKS}).items()))


def plain(source: str) -> str:
    """A script without `ps.epochs` and `ps.state`. One with a snapshot begins where that says."""
    source = source.replace("ps.epochs(max_epochs)", "range(self.epochs_run, max_epochs)")
    source = source.replace("ps.epochs()", "itertools.count()").replace("ps.epochs(", "range(").replace("ps.state(", "SimpleNamespace(")
    return source.replace("import torch\n", "import itertools\nfrom types import SimpleNamespace\n\nimport torch\n", 1)
