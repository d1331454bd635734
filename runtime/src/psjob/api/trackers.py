"""Trackers that a script has open are told what it reports to its job. None of them is imported here."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

log = logging.getLogger(__name__)
PREFIX: Final = "psjob/"
"""Before the names of what is told, so that nothing of the script's own is overwritten."""
_broken: set[str] = set()
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_looked = _told = 0
_defined: weakref.WeakSet[Any] = weakref.WeakSet()


def tell(numbers: Mapping[str, float], step: int) -> None:
    """Write numbers of this step to every tracker that is open. One that fails is left alone from then on, with a word in the log."""
    named = {f"{PREFIX}{name}": value for name, value in numbers.items()}
    for module, write in _WRITERS.items():
        if module in sys.modules and module not in _broken:
            try:
                write(sys.modules[module], named, step)
            except Exception as error:
                _broken.add(module)
                log.warning("%s takes no more numbers of the job: %s: %s", module, type(error).__name__, str(error)[:200])


def one_run(run: str, environ: MutableMapping[str, str]) -> None:
    """Let a worker that starts again go on in its W&B run. One that the script names itself is left."""
    if "WANDB_RUN_ID" not in environ:
        environ["WANDB_RUN_ID"] = run
        environ.setdefault("WANDB_RESUME", "allow")


def _to_tensorboard(module: Any, numbers: Mapping[str, float], step: int) -> None:
    global _looked, _told
    _told += 1
    if _told > 2 * _looked or _told == 1:  # instances are found by looking through the process, which takes a while
        _looked = _told
        _writers.update(one for one in gc.get_referrers(module.SummaryWriter) if type(one) is module.SummaryWriter)
    for writer in [one for one in _writers if one.file_writer is not None]:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)


def _to_wandb(module: Any, numbers: Mapping[str, float], step: int) -> None:
    run = getattr(module, "run", None)
    if run is None:
        return
    if run not in _defined:
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        _defined.add(run)
    run.log({**numbers, f"{PREFIX}step": step})


_WRITERS: Final[Mapping[str, Callable[[Any, Mapping[str, float], int], None]]] = {
    "torch.utils.tensorboard.writer": _to_tensorboard, "wandb": _to_wandb,
}  # fmt: skip
