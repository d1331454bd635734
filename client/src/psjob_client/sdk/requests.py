"""Requests for a checkpoint: the number that a new one has, and whether a checkpoint answers it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from psjob_client.jobs.view import CheckpointView


def next_request(saved: Mapping[str, Any], newest: CheckpointView | None) -> int:
    """The time, or more: above the request of `saved` (spec.checkpoint, as it is) and above the one that is answered."""
    answered = newest.observed_request if newest is not None else None
    return max(int(time.time()), asked(saved) + 1, (answered or 0) + 1)


def asked(saved: Mapping[str, Any]) -> int:
    """The request of spec.checkpoint; 0 where there is none."""
    found = saved.get("request")
    return found if isinstance(found, int) else 0


def answers(made: CheckpointView | None, number: int, saved: Mapping[str, Any]) -> bool:
    """Was this checkpoint begun after the job had read request `number`, or one that somebody has made of it since?"""
    answered = made.observed_request if made is not None else None
    return answered is not None and (answered >= number or answered == asked(saved))
