"""Lightning in a job: after `import psjob.integrations.lightning`, `Trainer(strategy="ps")`."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any, Final

import torch

import psjob as ps
from psjob.api import advice
from psjob.api import attach as attaching
from psjob.api.reporting import worker_place
from psjob.integrations import barriers, needs
from psjob.process.errors import refuse

try:
    from lightning.fabric.utilities.rank_zero import rank_zero_only as of_fabric
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

except ImportError as missing:
    raise needs("lightning", missing) from None

NAME: Final = "lightning"
"""Of what `attach` is given."""


class PSStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a `LightningModule` in the job around the script; outside a job, as on one device.

    Each worker trains on its slice of the training data, and validates on all of the validation data. The mean gradient of all workers is
    clipped with `gradient_clip_val`. `loss`, `lr` and what the module logs are reported only to the job. Rank 0 saves and logs. After a
    restart the loops continue at their batch.

    Args:
        device: where this worker trains; by default that of the Trainer's accelerator.
        named: as Lightning's SingleDeviceStrategy has it.

    Raises:
        SystemExit: with status 77 and a sentence, in a job, where the Trainer is asked for what cannot be done there: several optimizers,
            a second `fit`, or `ckpt_path` at its first start. A restart leaves that out.

    Example:
        >>> import psjob.integrations.lightning
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="ps", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    """

    strategy_name = "ps"

    def __init__(self, device: Any = None, **named: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **named)
        self._chosen = device is not None
        self._layer_sync: object = None
        """What `sync_batchnorm=True` of the Trainer gives."""
        self._place = worker_place()
        self.global_rank = ps.rank()
        rank_zero_only.rank = of_fabric.rank = self.global_rank

    @property
    def parallel_devices(self) -> list[torch.device]:
        """None are given to others; Lightning says here which ones there are."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and not self._chosen:
            self._root_device = devices[ps.rank() % len(devices)]

    @property
    def is_global_zero(self) -> bool:
        """Is this rank 0 of the job?"""
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Name the logs by the run of the job, so that they continue after a restart; Lightning numbers each start otherwise."""
        super().setup_environment()
        if self._place is None or self.lightning_module is None:
            return
        if (
            self._place.begins_again
        ):  # scripts ask for the newest checkpoint that they find in their folder; this start continues from the job's
            self.lightning_module.trainer._checkpoint_connector.resume_start = _nothing
        for logger in self.lightning_module.trainer.loggers:
            if type(logger).__name__ == "TensorBoardLogger" and logger._version is None:
                logger._version = self._place.run

    def process_dataloader(self, dataloader: object) -> object:
        """This worker's slice of a training loader; any other as it is."""
        module = self.lightning_module
        if self._place is None or module is None or module.trainer.state.fn != TrainerFn.FITTING or _evaluating(module.trainer):
            return dataloader
        slices = ps.shard(dataloader)  # type: ignore[var-annotated, arg-type]
        slices.led = True
        return Loader(slices)

    def setup(self, trainer: Trainer) -> None:
        """Attach, once model and optimizer are there."""
        super().setup(trainer)
        if self._place is None or trainer.state.fn != TrainerFn.FITTING:
            return
        _check(trainer)
        optimizers: list[torch.optim.Optimizer] = self.optimizers  # type: ignore[has-type]
        if len(optimizers) != 1:
            refuse(
                f"configure_optimizers gave {len(optimizers)} optimizers, and PSStrategy attaches one; train several in a loop of "
                "your own, with ps.attach(model, optimizer, name=...) for each"
            )
        if isinstance(self.precision_plugin, MixedPrecision):  # it refuses to clip for optimizers that unscale by themselves
            self.precision_plugin.clip_gradients = partial(Precision.clip_gradients, self.precision_plugin)
        progress = LightningProgress(trainer)
        ps.attach(
            self.lightning_module,
            optimizers[0],
            later=added_later(trainer, self.lightning_module, optimizers[0]),
            lightning=progress,
        )
        self.optimizers = optimizers  # wrapped anew, as what they are now
        self._on_term = signal.getsignal(signal.SIGTERM)
        trainer.callbacks.append(_Reports())
        if self._layer_sync is not None:
            advice.tell_asked("sync_batchnorm=True", ps.world())
        job = attaching.current
        if job is not None and job.restored is not None and NAME in job.restored.stateful:
            job.places.go_on()
            progress.go_on(job.restored.stateful[NAME])

    def on_train_start(self) -> None:
        """SIGTERM stops the job's workers together, at a step that all have made; Lightning's handler would end this one at once."""
        if self._place is not None:
            signal.signal(signal.SIGTERM, self._on_term)

    @property
    def is_distributed(self) -> bool:
        """Are there other processes? To the module's `log`, which reduces then; Lightning would also slice loaders, which psjob does."""
        return self._place is not None and sys._getframe(2).f_globals.get("__name__") == LOGS

    def reduce(self, tensor: Any, *given: Any, **named: Any) -> Any:
        """A value that is logged with `sync_dist=True` in training, over all workers. Validation is of all data on each of them already."""
        if not self._in_training(sys._getframe(1)):
            return tensor
        op = named.get("reduce_op", given[1] if len(given) > 1 else "mean")
        return barriers.reduced(tensor, op, "a value logged with sync_dist=True")

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """What all workers have in training; in an evaluation the tensor itself."""
        if self._place is None or not self._trains:
            return tensor
        return barriers.gathered(tensor, sync_grads, "all_gather")

    def _in_training(self, frame: FrameType) -> bool:
        """Has the module's log, or code of the script, asked in training? What Lightning decides by itself, each worker decides."""
        asks = str(frame.f_globals.get("__name__", ""))
        return self._place is not None and self._trains and (asks == LOGGED or not asks.startswith("lightning."))

    @property
    def _trains(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING and not _evaluating(module.trainer)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A file of Lightning's, as `trainer.test(ckpt_path="best")` reads it: in a job once rank 0 has written it."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if self._place is not None and trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            barriers.wait_for_first("the loading of a checkpoint")
            if not os.path.exists(checkpoint_path) and "://" not in str(checkpoint_path):
                refuse(
                    f"worker {self._place.index} does not see {checkpoint_path}, which rank 0 has written: give all workers one volume for "
                    "it, or leave ckpt_path out, so that the weights of now are taken"
                )
        return dict(super().load_checkpoint(checkpoint_path, weights_only=weights_only))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """What a checkpoint of Lightning holds: only on rank 0, which writes it."""
        return dict(super().optimizer_state(optimizer)) if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Refused in a job."""
        if self._place is not None:
            refuse(
                "Trainer.fit(ckpt_path=...) in a job: the job continues from its own checkpoints; leave it out, or begin from one of "
                "another run with checkpoint.resumeFrom"
            )
        super().load_optimizer_state_dict(checkpoint)


LOGGED: Final = "lightning.pytorch.trainer.connectors.logger_connector.result"
"""The module that reduces what is logged."""
LOGS: Final = "lightning.pytorch.core.module"
"""The module whose `log` asks whether there is something to reduce."""


def _check(trainer: Trainer) -> None:
    """Refuse what the Trainer is asked for and would not be right."""
    averages = next((one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging)), None)
    if averages is not None:
        refuse(
            "StochasticWeightAveraging in a job: its average would be in no checkpoint of the job. Keep a file of each epoch with "
            "ModelCheckpoint(save_top_k=-1), and take the mean of the last ones when the job is complete"
        )


def _nothing(*_given: object, **_named: object) -> None:
    pass


class Loader:
    """A worker's slice as Lightning's loops want it: they count batches by themselves, so its length is always that of a whole epoch."""

    def __init__(self, slices: Any) -> None:
        self._slices = slices
        try:
            self._length: int | None = len(slices)
        except TypeError:
            self._length = None

    def __iter__(self) -> Any:
        return iter(self._slices)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("an IterableDataset has no length")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_slices" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._slices, name)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the job's record holds the place. Lightning asks whether there is such a word before it warns of resuming."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class LightningProgress:
    """If a Trainer stands, as a restart puts it back."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The loops' counts, and the state of schedules, precision and callbacks."""
        loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"] = {key: value for key, value in loops["state_dict"].items() if key != "combined_loader"}
        return {
            "loops": loops,
            "schedulers": [config.scheduler.state_dict() for config in self._trainer.strategy.lr_scheduler_configs],
            "precision": self._trainer.strategy.precision_plugin.state_dict(),
            "callbacks": {name: one.state_dict() for name, one in self._callbacks().items()},
            "norms": norms(self._trainer.lightning_module),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what no loop counts; the loops continued by `go_on`."""
        for config, kept in zip(self._trainer.strategy.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(kept)
        self._trainer.strategy.precision_plugin.load_state_dict(state["precision"])
        for name, one in self._callbacks().items():
            if name in state["callbacks"]:
                one.load_state_dict(state["callbacks"][name])
        keep_groups(self._trainer.callbacks)
        put_back_norms(self._trainer.lightning_module, state.get("norms", {}))

    def go_on(self, state: dict[str, Any]) -> None:
        """Before the loops begin: at the batch of this state."""
        self._trainer.fit_loop.load_state_dict(state["loops"])
        self.load_state_dict(state)

    def _callbacks(self) -> dict[str, Callback]:
        return {one.state_key: one for one in self._trainer.callbacks if one.state_dict()}


class _Reports(Callback):  # type: ignore[misc]
    """Tells the job what Lightning knows."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step, or a part of one that is accumulated, was made."""
        if trainer.fit_loop._should_accumulate():
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        told = {"loss": loss} if isinstance(loss, torch.Tensor) else {}
        groups = trainer.optimizers[0].param_groups
        lr = {"lr": groups[0]["lr"]} if "lr" in groups[0] else {}
        total = trainer.estimated_stepping_batches
        whole = {"total": float(total)} if 0 < total < float("inf") else {}
        ps.report(**{**_logged(trainer), **told, **lr, **whole, "epoch": trainer.current_epoch})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The means of the last epoch are there, which no step follows."""
        ps.report(**{name: value for name, value in _logged(trainer).items() if name != "loss"})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Metrics of an evaluation are there."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            ps.report(**{name: value for name, value in _logged(trainer).items() if name != "loss"})


def _logged(trainer: Trainer) -> dict[str, Any]:
    return {name: value for name, value in trainer.callback_metrics.items() if isinstance(value, torch.Tensor) and value.numel() == 1}


def _evaluating(trainer: Trainer) -> bool:
    return bool(trainer.validating or trainer.sanity_checking or trainer.testing or trainer.predicting)


MOST_EPOCHS: Final = 1000
"""In which a group is looked for, where the Trainer names no number of epochs."""


def added_later(trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """For each group that a callback of BaseFinetuning will add to the optimizer, its parameters, in their order.

    The job has to know them from the beginning. A callback says so by what it does at each epoch. It is let do that once before training,
    with an optimizer that is thrown away, and everything that it changed is put back.
    """
    callbacks = [one for one in trainer.callbacks if isinstance(one, BaseFinetuning)]
    if not callbacks:
        return []
    recorder = _copied_optimizer(optimizer)
    known = len(recorder.param_groups)
    epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else MOST_EPOCHS
    with _put_back(module, callbacks), contextlib.redirect_stdout(io.StringIO()):
        for epoch in range(epochs):
            for one in callbacks:
                one.finetune_function(module, epoch, recorder)
    return [list(group["params"]) for group in recorder.param_groups[known:]]


def _copied_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another one of its class, of the same parameters."""
    made = copy.copy(optimizer)
    made.param_groups = [dict(group) for group in optimizer.param_groups]
    return made


@contextlib.contextmanager
def _put_back(module: LightningModule, callbacks: list[Any]) -> Iterator[None]:
    trained = [(p, p.requires_grad) for p in module.parameters()]
    tracked = norms(module)
    states = [(one, copy.copy(vars(one))) for one in callbacks]
    try:
        yield
    finally:
        for p, requires_grad in trained:
            p.requires_grad_(requires_grad)
        put_back_norms(module, tracked)
        for one, state in states:
            vars(one).clear()
            vars(one).update(state)


def norms(module: torch.nn.Module) -> dict[str, bool]:
    """Of each BatchNorm of the module, whether it takes statistics."""
    batch_norms = torch.nn.modules.batchnorm._BatchNorm
    return {name: one.track_running_stats for name, one in module.named_modules() if isinstance(one, batch_norms)}


def put_back_norms(module: torch.nn.Module, tracked: dict[str, bool]) -> None:
    """As `norms` gave it."""
    for name, one in module.named_modules():
        if name in tracked:
            one.track_running_stats = tracked[name]


def keep_groups(callbacks: list[Any]) -> None:
    """After a restart psjob puts the groups back by itself: these callbacks shall not make others of their own."""
    for one in callbacks:
        if isinstance(one, BaseFinetuning):
            one._restarting = False


StrategyRegistry.register("ps", PSStrategy, description="psjob: parameter-server training in the job around the script", override=True)
