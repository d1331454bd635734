"""Hugging Face's Trainer in a job: `Trainer(..., callbacks=[PSCallback()])`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

import psjob as ps
from psjob.api import advice
from psjob.api import attach as attaching
from psjob.api.reporting import worker_place
from psjob.integrations import barriers, needs
from psjob.process.errors import refuse
from psjob.process.startup import integrations_in_use

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as missing:
    raise needs("transformers", missing) from None

HISTORY: Final = 1 << 14
"""Characters of `log_history` that a restart puts back."""


class PSCallback(TrainerCallback):  # type: ignore[misc]
    """Makes a `Trainer` train in the job around the script; outside a job it does nothing.

    Each worker trains on its slice of the data. The mean gradient of all workers is clipped with `max_grad_norm`. `loss`, `lr` and what the
    Trainer logs are reported only to the job. Rank 0 saves and writes to trackers. After a restart the Trainer continues at its step.

    Returns:
        What `Trainer(callbacks=[...])` takes.

    Raises:
        SystemExit: with status 77 and a sentence, in a job, where the Trainer is asked for what cannot be done there: DeepSpeed, FSDP,
            `auto_find_batch_size`, a second model, or `resume_from_checkpoint` at its first start. A restart leaves that out.

    Example:
        >>> from psjob.integrations.transformers import PSCallback
        >>> callbacks = [PSCallback()]        # for Trainer(model, args, train_dataset=..., callbacks=callbacks)
    """

    def __init__(self) -> None:
        self._place = worker_place()
        self._progress: TransformersProgress | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any) -> None:
        """The Trainer is made: its data will be this worker's."""
        if self._place is None:
            return
        _check(args)
        trainer = _trainer_of(self)
        for knows in integrations_in_use():
            knows.mark(self._place)
        for one in trainer.callback_handler.callbacks:  # else each start has a folder of its own, named by the time
            if type(one).__name__ == "TensorBoardCallback" and one.logging_dir is None:
                one.logging_dir = os.path.join(args.output_dir, "runs", self._place.run)
        self._progress = TransformersProgress(trainer)
        trainer.train = _from_the_job(trainer.train, self._place.begins_again)
        if args.load_best_model_at_end:
            trainer._determine_best_metric = _knowing_best(trainer, trainer._determine_best_metric)
            trainer._load_best_model = _once_written(trainer, trainer._load_best_model)
        trainer.get_train_dataloader = _sharded(trainer.get_train_dataloader)
        trainer.training_step = self._progress.watching(trainer.training_step)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_others: Any,
    ) -> None:
        """Model, optimizer and schedule are there: the job begins, or continues."""
        if self._place is None:
            return
        if self._progress is None:
            refuse("PSCallback came after the Trainer was made; give it to Trainer(..., callbacks=[PSCallback()])")
        if state.global_step:
            refuse(RESUMES)
        job = attaching.current
        if job is None or job.model is not model:
            ps.attach(model, optimizer, trainer=self._progress)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_others: Any
    ) -> TrainerControl | None:
        """Report the step, unless it stands for one that was made before a restart."""
        if self._progress is None:
            return None
        if _skipping():
            return _quiet(control)
        lr = {"lr": optimizer.param_groups[0]["lr"]} if optimizer is not None and "lr" in optimizer.param_groups[0] else {}
        ps.report(loss=self._progress.take_loss(), total=state.max_steps, epoch=state.epoch or 0.0, **lr)
        return _once(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any) -> TrainerControl | None:
        """Nothing is evaluated or saved again for epochs that were finished before a restart."""
        if self._progress is None:
            return None
        return _quiet(control) if _skipping() else _once(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_others: Any
    ) -> None:
        """Report what the Trainer logs, such as metrics of an evaluation."""
        if self._progress is not None and not _skipping():
            own = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float) and key not in TOLD}
            if own:
                ps.report(**own)


TOLD: Final = ("loss", "learning_rate", "epoch", "step")
"""What is reported at each step already."""
FIELDS: Final = (
    "epoch", "global_step", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip
OWN: Final = ("_globalstep_last_logged", "_total_loss_scalar", "current_flos")
"""Of the Trainer itself."""


class TransformersProgress:
    """If a Trainer stands, as a restart puts it back."""

    counts_again = True
    """The Trainer counts the batches that stand for those of before, so that this is put back at its place only."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loss: torch.Tensor | float = 0.0

    def watching(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The Trainer's `training_step`, which does nothing for what stands in for a batch."""

        def training_step(model: torch.nn.Module, inputs: Any, *rest: Any, **named: Any) -> torch.Tensor:
            if isinstance(inputs, StandIn):
                return torch.zeros((), dtype=torch.float32, device=self._trainer.args.device)
            loss = step(model, inputs, *rest, **named)
            self._loss = self._loss + loss.detach()
            return loss

        return training_step

    def take_loss(self) -> torch.Tensor | float:
        """Of the step that was made now, its parts together."""
        loss, self._loss = self._loss, 0.0
        return loss

    def state_dict(self) -> dict[str, Any]:
        """All that the Trainer counts, and the state of its schedule, scaler and callbacks."""
        trainer = self._trainer
        kept = {name: float(loss) for name in ("_tr_loss",) if (loss := getattr(trainer, name, None)) is not None}
        return {
            "state": {name: getattr(trainer.state, name) for name in FIELDS if hasattr(trainer.state, name)},
            "history": _newest(trainer.state.log_history),
            "own": {name: getattr(trainer, name) for name in OWN if hasattr(trainer, name)} | kept,
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "callbacks": {name: callback.state()["attributes"] for name, callback in self._callbacks().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        trainer, self._loss = self._trainer, 0.0
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = json.loads(state["history"])
        for name, value in state["own"].items():
            before = getattr(trainer, name, None)
            setattr(trainer, name, torch.full_like(before, value) if isinstance(before, torch.Tensor) else value)
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        for name, callback in self._callbacks().items():
            for key, value in state["callbacks"].get(name, {}).items():
                setattr(callback, key, value)

    def _parts(self) -> dict[str, Any]:
        parts = {"lr_scheduler": self._trainer.lr_scheduler, "scaler": getattr(self._trainer.accelerator, "scaler", None)}
        return {name: part for name, part in parts.items() if part is not None}

    def _callbacks(self) -> dict[str, Any]:
        them = self._trainer.callback_handler.callbacks
        return {f"{number} {type(one).__name__}": one for number, one in enumerate(them) if isinstance(one, ExportableState)}


class StandIn(dict[str, Any]):
    """Given to the Trainer in place of a batch that was trained before a restart."""


def _newest(history: list[dict[str, Any]]) -> str:
    """The last entries of it, as JSON."""
    parts: list[str] = []
    size = 0
    for entry in reversed(history):
        part = json.dumps(entry, default=float)
        size += len(part)
        if size > HISTORY:
            break
        parts.append(part)
    return f"[{','.join(reversed(parts))}]"


def _sharded(original: Callable[[], Any]) -> Callable[[], Any]:
    def get_train_dataloader() -> Any:
        loader = ps.shard(original())
        loader.stand_in, loader.led = StandIn(), True
        return loader

    return get_train_dataloader


RESUMES: Final = (
    "Trainer.train(resume_from_checkpoint=...) in a job: the job continues from its own checkpoints; leave it out, or begin from one of "
    "another run with checkpoint.resumeFrom"
)


def _from_the_job(original: Callable[..., Any], begins_again: bool) -> Callable[..., Any]:
    """`Trainer.train`, which no file of the Trainer continues from. Scripts that start again ask for the newest one in their folder."""

    def train(resume_from_checkpoint: Any = None, *rest: Any, **named: Any) -> Any:
        if resume_from_checkpoint and not begins_again:
            refuse(RESUMES)
        if resume_from_checkpoint:
            advice.tell_once(
                "resumes", f"resume_from_checkpoint={resume_from_checkpoint!r} is left out: this start continues where the job was"
            )
        return original(None, *rest, **named)

    return train


def _knowing_best(trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
    """The best checkpoint is known to a rank that writes none: all find the same one best, and rank 0 names it by its step."""

    def determine(*given: Any, **named: Any) -> Any:
        found, state = original(*given, **named), trainer.state
        if not ps.is_first() and state.best_global_step:
            state.best_model_checkpoint = os.path.join(trainer.args.output_dir, f"checkpoint-{state.best_global_step}")
        return found

    return determine


def _once_written(trainer: Trainer, original: Callable[[], None]) -> Callable[[], None]:
    """`load_best_model_at_end`, when rank 0 has written all of its checkpoints."""

    def load() -> None:
        barriers.wait_for_first("load_best_model_at_end")
        best = trainer.state.best_model_checkpoint
        if not os.path.isdir(best):
            refuse(
                f"load_best_model_at_end: worker {ps.rank()} does not see {best}, which rank 0 has written. Give all workers one volume "
                "for output_dir, or leave it out"
            )
        original()

    return load


def _skipping() -> bool:
    job = attaching.current
    return job is not None and job.places.skipping


def _quiet(control: TrainerControl) -> TrainerControl:
    control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = False
    return control


def _once(control: TrainerControl) -> TrainerControl:
    """Checkpoints of the Trainer are rank 0's: every rank would write states of random numbers to the same file."""
    control.should_save = control.should_save and ps.is_first()
    return control


def _trainer_of(callback: PSCallback) -> Trainer:
    """The Trainer that is being made: callbacks are not told of it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        thing = frame.f_locals.get("self")
        if isinstance(thing, Trainer) and any(one is callback for one in thing.callback_handler.callbacks):
            return thing
        frame = frame.f_back
    refuse("PSCallback was called by no Trainer of transformers; give it to Trainer(..., callbacks=[PSCallback()])")
    raise AssertionError


def _check(args: TrainingArguments) -> None:
    """Refuse what this worker cannot do alone."""
    for name, why in (
        ("deepspeed", "DeepSpeed splits the model between processes"),
        ("fsdp", "FSDP splits the model between processes"),
        ("parallelism_config", "it splits the model between processes"),
        ("auto_find_batch_size", "each worker would find a batch size of its own; set per_device_train_batch_size"),
    ):
        if getattr(args, name, None):
            refuse(f"TrainingArguments({name}=...) in a job: {why}; leave {name} out")
