"""Values of a parametrized test that `make test` leaves to other tiers."""

from __future__ import annotations

from typing import Any

import pytest


def rotating(*values: Any, id: str | None = None) -> Any:
    """One set of parameters for `make soak`, of which each CI run takes a sixth."""
    return pytest.param(*values, id=id, marks=pytest.mark.rotating)


def soak(*values: Any, id: str | None = None) -> Any:
    """One set of parameters for `make soak` only."""
    return pytest.param(*values, id=id, marks=pytest.mark.soak)
