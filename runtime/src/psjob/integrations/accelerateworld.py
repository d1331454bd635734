"""What Accelerate says of all workers: how many processes there are, which one this is, and how long a loader is.

Each worker is alone to torch, and so to Accelerate. Its objects ask `PartialState` for the rest, which tells them of the job here. Loaders
stay whole: `psjob.shard` slices the one that is trained with, and every worker reads all of any other, such as one for evaluation.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import FrameType
from typing import Any, Final

from accelerate import data_loader
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.utils import data as torch_data

from psjob.api import advice, orders
from psjob.api.slices import options_of, rounds_of
from psjob.process.config import Place
from psjob.process.errors import refuse

TRAINER: Final = "transformers.training_args"
"""It asks for the state of a Trainer, which counts by itself what one process trains on."""
QUIET: Final = ("tqdm", "rich", "accelerate", "torch", "psjob")
"""They ask for a length to show it."""


class World:
    """The job, in the words of Accelerate."""

    def __init__(self, place: Place) -> None:
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


def _of_one_machine(place: Place) -> bool:
    """Do all workers share the machine of the shards, as under `psjob run`? A pod is a node of its own to Accelerate."""
    host = place.config.shards[0].host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def install(world: World) -> None:
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


class Part:
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
        return rounds_of(orders.length(plain(loader)), self._world.workers)

    def goes_over(self, batches: Callable[[], int]) -> None:
        """A loop goes over the loader itself, as in an evaluation: it is whole to every worker."""
        if self._whole or not self._world.of_script:
            return
        told, self._whole = self._asked, True
        if told:
            advice.tell(
                "length",
                f"len of a prepared loader, asked at {told}, was this worker's part of it, and a loop goes over all {batches()} batches of "
                "it on every worker. Ask for len within that loop or after it, or give the loader to ps.shard if it is trained with",
            )


PART: Final = "psjob_part"
"""Where a prepared loader has its `Part`."""


def part_of(loader: Any) -> Part | None:
    """None of a loader that was not prepared in a job."""
    found = vars(loader).get(PART) if hasattr(loader, "__dict__") else None
    return found if isinstance(found, Part) else None


def plain(loader: Any) -> Any:
    """The DataLoader of all batches that `prepare` was given."""
    base: Any = getattr(loader, "base_dataloader", loader)
    batches = base.batch_sampler
    if isinstance(base.dataset, torch_data.IterableDataset) or type(batches) is not torch_data.BatchSampler:
        return base
    part = part_of(loader)
    return torch_data.DataLoader(
        base.dataset,
        batch_size=batches.batch_size // (1 if part is None else part.pieces),
        drop_last=batches.drop_last,
        sampler=plain_sampler(batches.sampler),
        **options_of(base),
    )


def plain_sampler(sampler: Any) -> Any:
    """Torch's own for one that `prepare` has put in its place: its seed may be this process's own."""
    if type(sampler) is not SeedableRandomSampler:
        return sampler
    return torch_data.RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples if sampler.replacement else None)


def _length(length: Callable[[Any], int]) -> Callable[[Any], int]:
    @wraps(length)
    def counted(self: Any) -> int:
        part = part_of(self)
        return length(self) if part is None else part.length(self, length(self), sys._getframe(1))

    return counted


def _pass(passes: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """A pass over a loader itself. A single batch may be taken to look at it: only at the second one is it a pass."""

    @wraps(passes)
    def gone_over(self: Any) -> Iterator[Any]:
        part = part_of(self)
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
        setattr(made, PART, Part(world, pieces))
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
            advice.tell(
                "split",
                "split_between_processes gives every worker all inputs, so what each has in the end is whole. Write files on rank 0 only",
            )
            yield inputs
            return
        with split(self, inputs, apply_padding) as part:
            yield part

    return split_between_processes
