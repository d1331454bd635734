"""An object that two write in turns, each as it should be: such as a NetworkPolicy of two releases of the chart that serve one namespace.

Who sees its own words changed again and again rests, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIES, WITHIN_SECONDS = 3, 120.0
"""So many corrections of one object within this time are a contest. A person who edits it by hand needs longer."""
REST_SECONDS = 600.0
"""Until the object is put right once more."""


@dataclass
class Contests:
    """Of one job's objects, by `Kind/name`."""

    corrected: dict[str, list[float]] = field(default_factory=dict)
    """When this process put an object right that it had found changed."""

    def correct(self, label: str, now: float) -> None:
        """It was put right now."""
        self.corrected[label] = [*self.corrected.get(label, ()), now][-TRIES:]

    def rests_until(self, label: str, now: float) -> float | None:
        """Unix time until which it is left as the other writes it; None where it may be put right."""
        times = self.corrected.get(label, [])
        if len(times) < TRIES or times[-1] - times[0] > WITHIN_SECONDS or now >= times[-1] + REST_SECONDS:
            return None
        return times[-1] + REST_SECONDS

    def words(self, now: float) -> str:
        """What is contended now; empty for nothing."""
        found = sorted(label for label in self.corrected if self.rests_until(label, now) is not None)
        if not found:
            return ""
        return (
            f"another operator, or another controller, keeps changing {', '.join(found[:3])}; "
            f"it is left as it is for {REST_SECONDS / 60:.0f} minutes. Let one release of the chart serve this namespace"
        )
