"""The session of this process: alone in its worker, the first of several, or another one."""

from __future__ import annotations

from typing import Any

from psjob.process.config import Place
from psjob.worker.localgroup import FollowerSession, LeaderSession
from psjob.worker.session import WorkerSession


def session_at(place: Place, *given: Any) -> WorkerSession:
    """As WorkerSession. Raises Refused where the agent's lines to other processes are not open."""
    if place.config.processes == 1:
        return WorkerSession(place, *given)
    return FollowerSession(place, *given) if place.local else LeaderSession(place, *given)
