"""Accelerate in a job. A script imports nothing of this: `ps.attach` and `ps.shard` take what `accelerator.prepare` gives.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model, optimizer = ps.attach(model, optimizer)        # or before prepare
for batch in ps.shard(loader): ...

To torch, and so to Accelerate, each worker is the only process. Its objects ask `PartialState` for the rest, which names the job here.
Loaders stay whole: `psjob.shard` slices the one that is trained with, and every worker reads all of any other, such as one for
evaluation. What is computed of it is gathered already, and so is what a script gathers between its loops. In a pass of `psjob.shard`
workers have different batches: there values go by shard 0 to all.
"""

from __future__ import annotations

import gc
import ipaddress
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import FrameType
from typing import Any, Final

import torch
from torch.utils import data as torch_data

from psjob.api import advice, sample_order
from psjob.api import attach as attaching
from psjob.api.reporting import worker_place
from psjob.api.slices import loader_options, rounds_of
from psjob.integrations import barriers, needs
from psjob.process.config import ProcessContext
from psjob.process.errors import refuse

try:
    from accelerate import Accelerator, data_loader
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, operations, send_to_device
    from accelerate.utils.operations import recursively_apply
except ImportError as missing:
    raise needs("accelerate", missing) from None

TRAINER: Final = "transformers.training_args"
"""It asks for the state of a Trainer, which counts by itself what one process trains on."""
QUIET: Final = ("tqdm", "rich", "accelerate", "torch", "psjob")
"""They ask for a length to show it."""


def begin() -> None:
    """Let Accelerate know of the job, if this process is a worker of one, before the script asks it how many processes there are."""
    place = worker_place()
    if place is not None:
        mark(place)


def mark(place: ProcessContext) -> None:
    """Let Accelerate's states be those of this worker."""
    global _world
    if _world is None:
        _world = World(place)
        _install_states(_world)
        _install_collectives(_world)
    _world.mark()


_world: World | None = None


def inner(optimizer: Any) -> Any:
    """The torch optimizer that makes the steps."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


given = inner
"""What `attach` trains with, of the optimizer that it is given."""


def attached(optimizer: torch.optim.Optimizer) -> None:
    """Let wrappers of this torch optimizer, which is attached now, call its new `step`; one with a GradScaler has kept the old one."""
    for thing in gc.get_objects():
        if type(thing) is AcceleratedOptimizer and thing.optimizer is optimizer and thing.scaler is not None:
            thing.__setstate__({})


def moves(model: torch.nn.Module) -> bool:
    """Is `prepare` still to move this model to a device?"""
    device = AcceleratorState._shared_state.get("device")
    where = next((p.device for p in model.parameters()), None)
    return device is not None and where is not None and device.type != where.type


def hand(loader: Any) -> Callable[[Any], Any]:
    """What `loader` does to a batch before the script has it."""
    device, non_blocking = getattr(loader, "device", None), bool(getattr(loader, "_non_blocking", False))
    return lambda batch: batch if device is None else send_to_device(batch, device, non_blocking=non_blocking)


class Pass:
    """A pass over data as Accelerate sees it: accumulated gradients are stepped with at its last batch."""

    sharded = True
    """Workers have different batches in it."""

    def __init__(self, place: ProcessContext) -> None:
        mark(place)
        self.end_of_dataloader = False
        self.remainder = -1
        self._state = GradientState()
        self._state._add_dataloader(self)

    def gives(self, last: bool) -> None:
        """A batch goes to the script."""
        self.end_of_dataloader = last

    def over(self) -> None:
        """Nothing more is given."""
        self._state._remove_dataloader(self)


class World:
    """The job, in the words of Accelerate."""

    def __init__(self, place: ProcessContext) -> None:
        self.rank = place.rank
        self.workers = 1 if place.config.stages else place.world  # all stages work on each batch
        self.local = place.rank if _of_one_machine(place) else 0
        self.trainers = False
        """A Trainer of transformers is in use."""

    def mark(self) -> None:
        """Tell the states that there are. One whose script has started a process group is left as it is."""
        for state in (PartialState._shared_state, AcceleratorState._shared_state):
            if state.get("distributed_type") == DistributedType.NO:
                state["process_index"] = self.rank
                state["num_processes"] = 1 if self.trainers else self.workers
                state["local_process_index"] = 0 if self.trainers else self.local

    @property
    def of_script(self) -> bool:
        """Does the script's own loop use Accelerate, in a job of several workers?"""
        return not self.trainers and bool(PartialState._shared_state.get("num_processes", 1) > 1)


def _of_one_machine(place: ProcessContext) -> bool:
    """Do all workers share the machine of the shards, as under `psjob run`? A pod is a node of its own to Accelerate."""
    host = place.config.shards[0].host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _install_states(world: World) -> None:
    """Let Accelerate's classes ask `world`."""
    begin = PartialState.__init__

    @wraps(begin)
    def told(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        if sys._getframe(1).f_globals.get("__name__") == TRAINER:
            world.trainers = True
        world.mark()

    PartialState.__init__ = told
    PartialState.use_distributed = property(lambda self: self.num_processes > 1)
    PartialState.split_between_processes = _split(PartialState.split_between_processes, world)
    prepare, skip = data_loader.prepare_data_loader, data_loader.skip_first_batches
    rebind({prepare: _prepare(prepare, world), skip: _skip(skip, world)})
    for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
        kind.__len__, kind.__iter__ = _length(kind.__len__), _pass(kind.__iter__)
    data_loader.DataLoaderDispatcher.__init__ = _alone(data_loader.DataLoaderDispatcher.__init__)
    world.mark()


def rebind(functions: Mapping[Any, Any], but: tuple[str, ...] = ()) -> None:
    """Let all modules that have one of these have the other: a script may have imported it by its name before psjob. Not those of `but`."""
    names = {id(old): new for old, new in functions.items()}
    for module in [module for name, module in list(sys.modules.items()) if name not in but]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                vars(module)[name] = names[id(value)]


class LoaderPart:
    """Of a prepared loader: what `len` says of it."""

    def __init__(self, world: World, pieces: int) -> None:
        self.pieces = pieces
        """Into so many each batch is split between the workers (`split_batches`)."""
        self._world, self._whole, self._asked = world, False, ""

    def length(self, loader: Any, batches: int, frame: FrameType | None) -> int:
        """Batches of this worker in one pass of `psjob.shard`; all of them, once a loop goes over the loader itself."""
        if self._whole or not self._world.of_script:
            return batches
        if frame is not None and not frame.f_globals.get("__name__", "").startswith(QUIET):
            self._asked = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return rounds_of(sample_order.length(plain(loader)), self._world.workers)

    def goes_over(self, batches: Callable[[], int]) -> None:
        """A loop goes over the loader itself, as in an evaluation: it is whole to every worker."""
        if self._whole or not self._world.of_script:
            return
        told, self._whole = self._asked, True
        if told:
            advice.tell_once(
                "length",
                f"len of a prepared loader, asked at {told}, was this worker's part of it, and a loop goes over all {batches()} batches of "
                "it on every worker. Ask for len within that loop or after it, or give the loader to ps.shard if it is trained with",
            )


PART: Final = "psjob_part"
"""Where a prepared loader has its `LoaderPart`."""


def loader_part(loader: Any) -> LoaderPart | None:
    """None of a loader that was not prepared in a job."""
    found = vars(loader).get(PART) if hasattr(loader, "__dict__") else None
    return found if isinstance(found, LoaderPart) else None


def plain(loader: Any) -> Any:
    """The DataLoader of all batches that `prepare` was given."""
    base: Any = getattr(loader, "base_dataloader", loader)
    batches = base.batch_sampler
    if isinstance(base.dataset, torch_data.IterableDataset) or type(batches) is not torch_data.BatchSampler:
        return base
    part = loader_part(loader)
    return torch_data.DataLoader(
        base.dataset,
        batch_size=batches.batch_size // (1 if part is None else part.pieces),
        drop_last=batches.drop_last,
        sampler=plain_sampler(batches.sampler),
        **loader_options(base),
    )


def plain_sampler(sampler: Any) -> Any:
    """Torch's own for one that `prepare` has put in its place: its seed may be this process's own."""
    if type(sampler) is not SeedableRandomSampler:
        return sampler
    return torch_data.RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples if sampler.replacement else None)


def _length(length: Callable[[Any], int]) -> Callable[[Any], int]:
    @wraps(length)
    def counted(self: Any) -> int:
        part = loader_part(self)
        return length(self) if part is None else part.length(self, length(self), sys._getframe(1))

    return counted


def _pass(passes: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """A pass over a loader itself. A single batch may be taken to look at it: only at the second one is it a pass."""

    @wraps(passes)
    def gone_over(self: Any) -> Iterator[Any]:
        part = loader_part(self)
        for number, batch in enumerate(passes(self)):
            if number == 1 and part is not None:
                part.goes_over(lambda: len(self))
            yield batch

    return gone_over


def _prepare(prepare: Callable[..., Any], world: World) -> Callable[..., Any]:
    """Loaders are prepared as for one process, so that nothing of them is sliced before `psjob.shard`."""
    known = signature(prepare)

    @wraps(prepare)
    def prepare_data_loader(*given: Any, **named: Any) -> Any:
        words = known.bind(*given, **named)
        words.arguments.update(num_processes=1, process_index=0)
        pieces = world.workers if words.arguments.get("split_batches") and world.of_script else 1
        _check_pieces(words.arguments["dataloader"], pieces)
        made = prepare(*words.args, **words.kwargs)
        setattr(made, PART, LoaderPart(world, pieces))
        return made

    return prepare_data_loader


def _check_pieces(loader: Any, pieces: int) -> None:
    """Refuse to split batches that psjob could not split as Accelerate does."""
    if pieces == 1:
        return
    why = ""
    if isinstance(loader.dataset, torch_data.IterableDataset) or type(loader.batch_sampler) is not torch_data.BatchSampler:
        why = "a loader whose batches are not cut from one order of samples; leave split_batches out, so that a batch size is per worker"
    elif loader.batch_size % pieces:
        why = f"a batch size of {loader.batch_size} and {pieces} workers, between which it is split; take a multiple of {pieces}"
    if why:
        refuse(f"Accelerator(split_batches=True) with {why}")


def _skip(skip: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if not world.of_script:
            return skip(dataloader, num_batches)
        if num_batches:
            refuse(f"skip_first_batches({num_batches}) in a job: ps.shard continues at its batch after a restart; take the loader as it is")
        return dataloader

    return skip_first_batches


class _OneProcess:
    """What a loader that process 0 would read for all asks: every worker reads it by itself."""

    num_processes, process_index = 1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(PartialState(), name)


def _alone(begin: Callable[..., None]) -> Callable[..., None]:
    @wraps(begin)
    def by_itself(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.state = _OneProcess()

    return by_itself


def _split(split: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(split)
    @contextmanager
    def split_between_processes(self: Any, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        if world.of_script:
            advice.tell_once(
                "split",
                "split_between_processes gives every worker all inputs, so what each has in the end is whole. Write files on rank 0 only",
            )
            yield inputs
            return
        with split(self, inputs, apply_padding) as part:
            yield part

    return split_between_processes


def _install_collectives(world: World) -> None:
    """Let Accelerate's functions ask the other workers."""
    PartialState.wait_for_everyone = _wait(PartialState.wait_for_everyone, world)
    Accelerator.check_trigger = _trigger(Accelerator.check_trigger, world)
    own = operations
    makes = {own.gather: _gather, own.gather_object: _gather_object, own.reduce: _reduce, own.broadcast: _broadcast}
    makes[own.broadcast_object_list] = _broadcast_objects
    rebind({old: make(old, world) for old, make in makes.items()}, but=(data_loader.__name__,))  # every worker reads by itself


def _apart(world: World, what: str) -> bool:
    """Have workers different values at this place of the script? Refuses where some of them do not come to it."""
    if not world.of_script or not getattr(GradientState().active_dataloader, "sharded", False):
        return False
    job = attaching.current
    if job is None:
        return False
    under_way = job.places.under_way
    if not job.training:
        job.refuse(
            f"{what} in a pass over ps.shard that trains nothing: workers have different numbers of its batches. Take the loader as "
            "prepare gave it, which every worker reads whole"
        )
    if not job.clips or (under_way is not None and job.places.reads_ahead(under_way[0])):
        advice.tell_once(
            "gather",
            f"{what} in training gives each worker its own value for those of all: in mode {job.place.config.mode}, and where batches are "
            "read ahead, workers do not stand at the same step",
        )
        return False
    return True


def _in_training(world: World) -> bool:
    return world.of_script and bool(getattr(GradientState().active_dataloader, "sharded", False))


def _of_all(value: Any, what: str, world: World) -> list[Any]:
    """By rank, in training; a worker's own value for each where they cannot be had."""
    return barriers.of_all(value, what) if _apart(world, what) else [value] * world.workers


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those of nested lists, tuples and dicts, in their order. Raises TypeError for what is none."""
    found: list[torch.Tensor] = []
    recursively_apply(found.append, value, error_on_other_type=True)
    return found


def _joined(value: Any, heard: list[list[torch.Tensor]], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """`value` with each tensor replaced by what all workers have for it."""
    each = iter(range(len(heard[0])))

    def one(tensor: torch.Tensor) -> torch.Tensor:
        number = next(each)
        return join([theirs[number].to(tensor.device) for theirs in heard])

    return recursively_apply(one, value, error_on_other_type=True)


def _gather(gather: Callable[[Any], Any], world: World) -> Callable[[Any], Any]:
    @wraps(gather)
    def gathered(tensor: Any) -> Any:
        if not _in_training(world):
            return gather(tensor)
        heard = _of_all(_tensors(tensor), "gather", world)
        return _joined(tensor, heard, lambda parts: torch.cat([part[None] if part.ndim == 0 else part for part in parts]))

    return gathered


def _gather_object(gather: Callable[[Any], Any], world: World) -> Callable[[Any], Any]:
    @wraps(gather)
    def gathered(object: Any) -> Any:
        if not _in_training(world):
            return gather(object)
        return [one for theirs in _of_all(object, "gather_object", world) for one in theirs]

    return gathered


def _reduce(reduce: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(reduce)
    def reduced(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        if not _in_training(world):
            return reduce(tensor, reduction, scale)
        return summed(tensor, _of_all(_tensors(tensor), "reduce", world), reduction)

    return reduced


def summed(tensor: Any, heard: list[list[torch.Tensor]], reduction: str) -> Any:
    """As torch's all_reduce: the sum, or the largest; `mean` divides the sum by how many there are."""

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack(parts)
        found = whole.amax(0) if reduction == "max" else whole.sum(0, dtype=parts[0].dtype)
        return found / len(parts) if reduction == "mean" else found

    return _joined(tensor, heard, join)


def _broadcast(broadcast: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(broadcast)
    def sent(tensor: Any, from_process: int = 0) -> Any:
        if not world.of_script:
            return broadcast(tensor, from_process)
        heard = barriers.of_all(_tensors(tensor) if world.rank == from_process else [], "broadcast")
        return _joined(tensor, [heard[from_process]], lambda parts: parts[0])

    return sent


def _broadcast_objects(broadcast: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(broadcast)
    def sent(object_list: list[Any], from_process: int = 0) -> list[Any]:
        if world.of_script:
            own = list(object_list) if world.rank == from_process else []
            object_list[:] = barriers.of_all(own, "broadcast_object_list")[from_process] or object_list
            return object_list
        return list(broadcast(object_list, from_process))

    return sent


def _wait(wait: Callable[[Any], None], world: World) -> Callable[[Any], None]:
    @wraps(wait)
    def waited(self: Any) -> None:
        if world.of_script:
            barriers.everyone("wait_for_everyone")
        else:
            wait(self)

    return waited


def _trigger(check: Callable[[Any], bool], world: World) -> Callable[[Any], bool]:
    """Any worker's trigger is all workers', at every place of a script."""

    @wraps(check)
    def checked(self: Any) -> bool:
        if not world.of_script:
            return check(self)
        if attaching.current is not None and not attaching.current.clips:
            refuse(
                f"Accelerator.check_trigger in mode {attaching.current.place.config.mode}: workers do not stand at the same step. Decide "
                "by what all workers have, such as a metric of an evaluation"
            )
        own = self.flag_tensor is not None and bool(self.flag_tensor >= 1)
        found = any(barriers.of_all(own, "check_trigger"))
        if found:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return found

    return checked
