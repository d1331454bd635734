"""Trackers that a script has open get what it reports to its job. None of them is imported here."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from psjob.api.recording import BackgroundWriter
from psjob.process import startup

log = logging.getLogger(__name__)
PREFIX: Final = "psjob/"
"""Before the names of what is sent, so that nothing of the script's own is overwritten."""
HAND_OVER_SECONDS: Final = 10.0
"""For trackers to write what they hold, before a process that is started again ends."""
MLFLOW_MOST: Final = 1000
"""Metrics of one call that MLflow takes."""
_broken: set[str] = set()
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_looked = _told = 0
_defined: weakref.WeakSet[Any] = weakref.WeakSet()


def tell_trackers(numbers: Mapping[str, float], step: int) -> None:
    """Write numbers of this step to every tracker that is open. One that fails is left alone from then on, with a word in the log."""
    named = {f"{PREFIX}{name}": value for name, value in numbers.items()}
    for module, write in _WRITERS.items():
        if module in sys.modules and module not in _broken:
            try:
                write(sys.modules[module], named, step)
            except Exception as error:
                _leave(module, error)


def _leave(module: str, error: Exception) -> None:
    _broken.add(module)
    log.warning("%s takes no more numbers of the job: %s: %s", module, type(error).__name__, str(error)[:200])


def hand_over() -> dict[str, str]:
    """Before this process is started again in place: open trackers write what they hold.

    Returns what the next start has in its environment, so that it continues in the same runs.
    """
    waiting: list[tuple[str, Callable[[], object]]] = []
    environ: dict[str, str] = {}
    for module, prepare in _HAND_OVER.items():
        if module in sys.modules and module not in _broken:
            try:
                waiting.append((module, prepare(sys.modules[module], environ)))
            except Exception as error:
                log.warning("%s may lack the last numbers: %s: %s", module, type(error).__name__, str(error)[:200])
    if not waiting:
        return environ
    writing = threading.Thread(target=_write_out, args=(waiting,), name="psjob-trackers", daemon=True)
    writing.start()
    writing.join(HAND_OVER_SECONDS)
    if writing.is_alive():
        log.warning("a tracker has not written all that it holds within %.0f s; its last numbers may be lost", HAND_OVER_SECONDS)
    return environ


def _write_out(waiting: list[tuple[str, Callable[[], object]]]) -> None:
    for module, write in waiting:
        try:
            write()
        except Exception as error:
            log.warning("%s may lack the last numbers: %s: %s", module, type(error).__name__, str(error)[:200])


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


def _to_mlflow(module: Any, numbers: Mapping[str, float], step: int) -> None:
    run = module.active_run()
    if run is not None:
        _mlflow.put((run.info.run_id, step, time.time(), numbers))


def _write_mlflow(items: list[tuple[str, int, float, Mapping[str, float]]]) -> None:
    # MLflow's own asynchronous logging loses what waits when the process ends.
    mlflow = sys.modules["mlflow"]
    client = mlflow.MlflowClient()
    for run in dict.fromkeys(item[0] for item in items):
        of_run = [(step, at, numbers) for name, step, at, numbers in items if name == run]
        metrics = [
            mlflow.entities.Metric(key, value, int(at * 1000), step) for step, at, numbers in of_run for key, value in numbers.items()
        ]
        for first in range(0, len(metrics), MLFLOW_MOST):
            client.log_batch(run, metrics=metrics[first : first + MLFLOW_MOST])


_mlflow: Final = BackgroundWriter(_write_mlflow, lambda error: _leave("mlflow", error))


def _keep_tensorboard(module: Any, environ: dict[str, str]) -> Callable[[], object]:
    writers = [one for one in gc.get_referrers(module.SummaryWriter) if type(one) is module.SummaryWriter and one.file_writer is not None]
    return lambda: [writer.flush() for writer in writers]


def _keep_wandb(module: Any, environ: dict[str, str]) -> Callable[[], object]:
    run = getattr(module, "run", None)
    if run is None:
        return lambda: None
    startup.one_run(run.id, environ)
    return lambda: run.finish()


def _keep_mlflow(module: Any, environ: dict[str, str]) -> Callable[[], object]:
    run = module.active_run()
    if run is None:
        return lambda: None
    # `start_run()` continues in this one; a nested run begins anew below it.
    environ["MLFLOW_RUN_ID"] = run.data.tags.get("mlflow.parentRunId", run.info.run_id)
    return lambda: _mlflow.drain(HAND_OVER_SECONDS)


_WRITERS: Final[Mapping[str, Callable[[Any, Mapping[str, float], int], None]]] = {
    "torch.utils.tensorboard.writer": _to_tensorboard, "wandb": _to_wandb, "mlflow": _to_mlflow,
}  # fmt: skip
_HAND_OVER: Final[Mapping[str, Callable[[Any, dict[str, str]], Callable[[], object]]]] = {
    "torch.utils.tensorboard.writer": _keep_tensorboard, "wandb": _keep_wandb, "mlflow": _keep_mlflow,
}  # fmt: skip
"""Each notes what is open, in the thread of the script, and gives what writes it out, which may take a while."""
