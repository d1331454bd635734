"""Which job the running cell of a notebook has shown already: then it is not shown again as the cell's value."""

from __future__ import annotations

import sys
from typing import Any

_shown: tuple[object, int] | None = None
"""The view, and the number of the cell."""


def shell() -> Any:
    """The notebook's shell; None: this is no notebook."""
    found = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return found if hasattr(found, "kernel") else None


def mark(view: object) -> None:
    """This view has been shown by the cell that runs."""
    global _shown
    if (notebook := shell()) is not None:
        _shown = view, notebook.execution_count


def marked(view: object) -> bool:
    """Has the cell that runs shown this view?"""
    notebook = shell()
    return notebook is not None and _shown is not None and _shown[0] is view and _shown[1] == notebook.execution_count
