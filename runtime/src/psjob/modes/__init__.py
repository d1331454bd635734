"""Modes: which pushes count, and who may continue. Pure."""

from typing import Any, Final, Protocol

from psjob import contract
from psjob.modes.asynchronous import Async
from psjob.modes.backup import Backup
from psjob.modes.base import Batch, Mode, Push, ServedMode
from psjob.modes.bounded import Bounded
from psjob.modes.local import LocalAsync, LocalSGD, Quorum
from psjob.modes.softsync import Softsync
from psjob.modes.sync import Sync
from psjob.modes.threshold import Threshold

__all__ = [
    "Async", "Backup", "Batch", "Bounded", "LocalSGD", "LocalAsync", "MODES", "Mode", "Push", "Quorum", "ServedMode", "Softsync", "Sync",
    "Threshold", "config_of", "of", "parse_mode", "format_mode",
]  # fmt: skip

MODES: Final[dict[str, type[Mode]]] = {
    mode.name: mode for mode in (Sync, Backup, Bounded, Softsync, Async, Threshold, LocalSGD, LocalAsync)
}
"""All of them; the simulator runs each."""


class RoundConfig(Protocol):
    """Of mode local."""

    @property
    def inner_steps(self) -> int: ...

    @property
    def quorum(self) -> int: ...

    @property
    def grace_seconds(self) -> float: ...


class ModeConfig(Protocol):
    """What a job's config says of its mode."""

    @property
    def mode(self) -> str: ...

    @property
    def backup_workers(self) -> int: ...

    @property
    def staleness(self) -> int | None: ...

    @property
    def splits(self) -> int | None: ...

    @property
    def local(self) -> RoundConfig: ...

    @property
    def update_rule(self) -> str | None: ...

    @property
    def delay(self) -> int: ...


def of(job: ModeConfig) -> ServedMode:
    """The mode that a job runs. Raises ValueError with the names that exist, or for a delay that the mode cannot have."""
    if job.delay and (job.mode not in ("sync", "bounded", "async") or job.backup_workers):
        raise ValueError(f"training.delay is {job.delay} in mode {job.mode}; sync without backupWorkers, bounded and async have one")
    match job.mode:
        case "sync":
            return Backup(job.backup_workers) if job.backup_workers else Sync(job.delay)
        case "async":
            return Async(job.delay)
        case "bounded":
            made = Bounded(delay=job.delay) if job.staleness is None else Bounded(job.staleness, job.delay)
            return made if made.staleness else Sync()
        case "local" if job.update_rule == contract.ASYNC_OUTER_RULE:
            return LocalAsync(job.local.inner_steps)
        case "local":
            made_of = Quorum if job.local.quorum else LocalSGD
            return made_of(job.local.inner_steps, job.local.quorum, job.local.grace_seconds)
        case "softsync":
            return Softsync() if job.splits is None else Softsync(job.splits)
        case "threshold":
            return Threshold() if job.staleness is None else Threshold(job.staleness)
    raise ValueError(f"training.mode is {job.mode!r}; this version has {', '.join(contract.MODES)}")


def config_of(mode: Mode) -> dict[str, Any] | None:
    """What a job's config file says for this mode: `of`, read backwards. None: no job can have it."""
    delay = {"delay": mode.delay} if mode.delay else {}
    match mode:
        case Sync() | Async():
            return {"mode": mode.name, **delay}
        case Backup():
            return {"mode": "sync", "backupWorkers": mode.backup_workers}
        case Bounded():
            return {"mode": mode.name, "staleness": mode.staleness, **delay}
        case Threshold():
            return {"mode": mode.name, "staleness": mode.staleness}
        case Softsync() if mode.by_staleness:
            return {"mode": mode.name, "splits": mode.splits}
        case LocalSGD() if not mode.quorum:
            return {"mode": mode.name, "local": {"innerSteps": mode.inner_steps}}
        case LocalAsync():
            return {"mode": "local", "local": {"innerSteps": mode.inner_steps}, "updateRule": contract.ASYNC_OUTER_RULE}
    return None


def format_mode(mode: ServedMode) -> str:
    """A mode with its numbers in one word, such as bounded:3, sync:delay=1 or bounded:3:delay=2."""
    number = mode.staleness if isinstance(mode, Bounded) else mode.ahead
    return mode.name + (f":{number}" if number else "") + (f":{_DELAY}{mode.delay}" if mode.delay else "")


def parse_mode(word: str) -> ServedMode:
    """The mode that `format_mode` wrote, of those among which a running job changes. Raises ValueError for any other word."""
    name, *numbers = word.split(":")
    delay = int(numbers.pop().removeprefix(_DELAY)) if numbers and numbers[-1].startswith(_DELAY) else 0
    match name, numbers:
        case "sync", []:
            return Sync(delay)
        case "bounded", []:
            return Bounded(delay=delay)
        case "bounded", [number]:
            return Bounded(int(number), delay)
        case "async", []:
            return Async(delay)
    raise ValueError(f"mode {word!r}; a running job changes among sync, bounded, async")


_DELAY: Final = "delay="
