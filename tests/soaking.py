"""Values of a parametrized test that `make test` leaves to `make soak`."""

from __future__ import annotations

from typing import Any

import pytest


def soak(*values: Any) -> Any:
    """One set of parameters, for `make soak` alone."""
    return pytest.param(*values, marks=pytest.mark.soak)
