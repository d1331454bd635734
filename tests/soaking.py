"""Values of a parametrized test that `make test` leaves to `make soak`."""

from __future__ import annotations

from typing import Any

import pytest


def soak(*values: Any, id: str | None = None) -> Any:
    """One set of parameters, for `make soak` alone."""
    return pytest.param(*values, id=id, marks=pytest.mark.soak)
