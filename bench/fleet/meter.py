"""What each phase cost: CPU and memory of processes, and the operator's requests from the audit log."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 where it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 where it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def busy_seconds() -> float:
    """CPU time that the whole machine has spent."""
    values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / _TICK


@dataclass
class Phase:
    """One stretch of the run."""

    begin: float
    end: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)
    foreign_cores: float = 0.0
    """What the rest of the machine used: the noise."""
    requests: Counter[str] = field(default_factory=Counter)


@dataclass
class Meter:
    """`processes`: pid by name, which may grow."""

    processes: dict[str, int]
    phases: dict[str, Phase] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measure what happens inside."""
        before, busy = self._cpu(), busy_seconds()
        phase = self.phases[name] = Phase(begin=time.time())
        try:
            yield phase
        finally:
            phase.end = time.time()
            phase.cpu = {who: spent - before.get(who, 0.0) for who, spent in self._cpu().items()}
            others = busy_seconds() - busy - sum(phase.cpu.values())
            phase.foreign_cores = others / max(phase.end - phase.begin, 0.01)

    def count(self, audit: Path, user: str) -> None:
        """Read what this user asked in each phase; a watch counts once, where it began."""
        for event in _events(audit, user):
            at = datetime.strptime(event["requestReceivedTimestamp"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
            for phase in self.phases.values():
                if phase.begin <= at < phase.end:
                    phase.requests[_word(event)] += 1

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in {**self.processes, "bench": os.getpid()}.items()}


def _events(audit: Path, user: str) -> Iterator[Mapping[str, Any]]:
    with audit.open() as lines:
        for line in lines:
            if user not in line:
                continue
            event = json.loads(line)
            stage = "ResponseStarted" if event["verb"] == "watch" else "ResponseComplete"
            if event["user"]["username"] == user and event["stage"] == stage:
                yield event


def _word(event: Mapping[str, Any]) -> str:
    meant = event.get("objectRef") or {}
    resource = meant.get("resource", "discovery") + (f"/{meant['subresource']}" if meant.get("subresource") else "")
    code = event.get("responseStatus", {}).get("code", 0)
    return f"{event['verb']} {resource}" + (f" {code}" if code >= 400 else "")
