"""What a worker tells of its weights and its data, so that shard 0 sees where workers differ (`psjob.protocol.coordinator.consistency`).

Weights: at its beginning a worker tells sums over frozen parameters, which each script builds by itself. If all workers stand at one
step, it tells a few windows of its parameters every EVERY steps. At a checkpoint and at its end it tells sums over all of them and its
buffers. The sums go at the speed of memory: over all of a tensor, or over a few windows that a step's number chooses.

Data: all must read the same, since `ps.shard` gives each worker its part of them. Values of a sample are no measure: they may be drawn
anew each time that it is read. Compared are what the data are made of (tensors, arrays, lists), and samples that come out the same twice.
A script without `ps.shard` tells a sum over each of its first inputs, so that workers with the same data can be reported.
"""

from __future__ import annotations

import math
import platform
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import PurePath
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data as torch_data
from torch.utils.hooks import RemovableHandle

from psjob.api import advice, values
from psjob.api.attachable import AT_ONCE, Pair
from psjob.api.sample_order import attributes, seeded
from psjob.embeddings.row_tables import Table
from psjob.layout import devices, memory, packing
from psjob.protocol.coordinator.consistency import BEGIN, BUFFER, END, FROZEN, OTHER, TRAINED, WHOLE, WINDOWS
from psjob.worker.exchange import GradientClip
from psjob.worker.overlap import Hook, before_forward
from psjob.worker.session import WorkerSession

EVERY: Final = 16
"""From one look at windows to the next, steps."""
LANDED: Final = 64
"""The same where a step does not wait for the weights, so that a look has to."""
SHORT: Final = 64
"""Steps of a job that may end before a look at any of them."""
MOST: Final = 512
"""Sums of one kind of tensor in a digest."""
GROUPS, NUMBERS = 32, 32
"""Parameter groups, and numbers of each, that are compared."""
CLIPPED: Final = "max_norm of clip_grad_norm_"
"""The name of that number; 0: nothing is clipped."""
STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of normalisation layers, which are each worker's own."""
Row = tuple[str, str, torch.Tensor]
"""Kind, name and tensor."""
MOST_UNATTACHED: Final = 64
"""Parameters of optimizers that were not given to `attach`, at most, that digests hold."""
LOOKS, WINDOW = 4, 4 << 10
"""So many windows of so many bytes are looked at in a step."""
PART: Final = 1 << 30
"""Bytes that are summed at one moment: of a larger model a part, which the step's number chooses."""
UNREAD: Final = -1
"""In place of a sum: the tensor has no memory, or not one array of it."""
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2^64 by the golden ratio: multiples of it lie far apart (Knuth, The Art of Computer Programming, 6.4)."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass
class Stepping:
    """Of the script's steps, as they are made."""

    thread: int = field(default_factory=threading.get_ident)
    """The one that trains."""
    under_way: bool = False
    """An attached optimizer makes its step."""
    without_batch: int = 0
    """Steps for which this worker had no batch, so that its loop's body did not run."""


class WeightDigests:
    """Of an attached script. What is compared depends on the mode. `anchors`: identities of parameters that stand for rows on the shards.

    `local`: the worker makes steps of its own between two pushes.
    """

    def __init__(
        self, session: WorkerSession, model: torch.nn.Module, parameters: Sequence[torch.Tensor], anchors: Collection[int], local: bool,
        unattached: Unattached, steps: Stepping,
    ) -> None:  # fmt: skip
        self._session, self._model, self._parameters, self._anchors = session, model, parameters, anchors
        self._unattached, self._steps = unattached, steps
        config = session.place.config
        alone = config.workers == 1 or bool(config.stages) or session.place.local > 0
        plain = session.mode.steady and not session.mode.decided
        self._frozen_at_begin = not alone
        self._trained = not alone and (session.mode.rewinds_together and (session.reduces or config.compression.pull == "none"))
        self._together = not alone and plain and not local
        """All workers stand at one step, and what their scripts do between steps is the same."""
        self._windows: tuple[int, list[Row], Windows] | None = None
        self._begun = self._over = False
        self._numbers: tuple[int, list[dict[str, float]]] = (0, [])
        """The hyperparameters of the last step that is looked at, and the clock to which it led."""
        self._last: tuple[str, int] | None = None

    def stepping(self, asked: Sequence[Mapping[str, Any]], clip: GradientClip) -> None:
        """The optimizer steps next with these hyperparameters, here or on the shards. Between steps a scheduler may be further on."""
        session, clock = self._session, self._session.clock
        if self._together and (clock < SHORT or clock % EVERY == 0 or session.machine.snapshot_clock == clock):
            groups = [_numbers(group) for group in asked[:GROUPS]]
            self._numbers = clock, [{**groups[0], CLIPPED: clip.norm or 0.0}, *groups[1:]] if groups else []

    def begin(self) -> None:
        """The script is in its job, and has made no step."""
        if self._frozen_at_begin and self._session.clock == 0 and self._session.record is None:
            self._send([row for row in self._rows() if row[0] == FROZEN], 0, BEGIN)
        self._begun = True

    def step_boundary(self, snapshot: bool) -> None:
        """The script stands between two steps; `snapshot`: at the step of a checkpoint."""
        clock = self._clock()
        if clock is None or not clock or not (self._trained or self._together):
            return
        look = WHOLE if snapshot else WINDOWS
        if self._last == (look, clock):  # between two passes a step boundary may come twice
            return
        self._last = look, clock
        if snapshot:
            self._session.exchange.finish()  # weights that are landing are no worker's own
            self._whole(clock, WHOLE)
        elif clock % (LANDED if self._session.exchange.overlaps or self._session.exchange.delay else EVERY) == 0:
            self._session.exchange.finish()
            self._look(clock)

    def leave(self) -> None:
        """The script is through."""
        self._session.exchange.catch_up()
        self._over = True
        clock = self._clock()
        if clock and self._begun and (self._trained or self._together):
            self._whole(clock, END)

    def _clock(self) -> int | None:
        """What workers with the same weights have in common; None: the blocks of this one are of several updates, or newer than usual."""
        session = self._session
        if session.exchange.delay and not session.exchange.behind and not self._over:
            return None  # this script has waited for its push, and others may not have
        if not session.mode.decided:
            return session.clock
        versions = {n for _, n in session.exchange.versions.values()}
        return versions.pop() if len(versions) == 1 else None

    def _look(self, clock: int) -> None:
        others = len(self._unattached.parameters)
        if self._windows is None or self._windows[0] != others:
            rows = self._rows()
            self._windows = others, rows, Windows([tensor for _, _, tensor in rows])
        _, rows, windows = self._windows
        seen = windows.at(clock)
        self._tell(clock, [rows[row][:2] for row, _ in seen], [crc for _, crc in seen], True, WINDOWS)

    def _whole(self, clock: int, look: str) -> None:
        rows = self._rows()
        if self._together:
            rows += self._buffers()
        self._send([rows[row] for row in rows_of_part([tensor for _, _, tensor in rows], clock)], clock, look)

    def _send(self, rows: Sequence[Row], clock: int, look: str) -> None:
        named: list[tuple[str, str]] = []
        told: list[int] = []
        values = sums([tensor for _, _, tensor in rows])
        for kind in dict.fromkeys(row[0] for row in rows):
            own = [at for at, row in enumerate(rows) if row[0] == kind]
            for at, value in grouped_sums([values[row] for row in own], MOST):
                named.append(rows[own[at]][:2])
                told.append(value)
        self._tell(clock, named, told, self._session.place.index == 0, look)

    def _tell(self, clock: int, rows: Sequence[tuple[str, str]], told: Sequence[int], names: bool, look: str) -> None:
        body: dict[str, Any] = {
            "clock": clock, "look": look, "kinds": "".join(kind for kind, _ in rows), "sums": list(told),
            "alone": self._session.reduces,
        }  # fmt: skip
        if names:
            body["names"] = [name for _, name in rows]
        body["numbers"] = self._numbers[1] if self._numbers[0] == clock else []
        if self._session.reduces:
            body["machine"] = processor_of(self._parameters)
        if self._unattached.kinds:
            body["strangers"] = self._unattached.kinds
        if self._steps.without_batch:
            body["leftOut"] = self._steps.without_batch
        self._session.digest(body)

    def _rows(self) -> list[Row]:
        model, parameters = self._model, self._parameters
        rows: list[Row] = []
        if self._trained:
            names = (spec.name for spec in self._session.layout.table)
            rows += [(TRAINED, name, p) for name, p in zip(names, parameters, strict=True) if id(p) not in self._anchors]
        known = {id(p) for p in parameters} | {id(module.anchor) for module in model.modules() if isinstance(module, Table)}
        others = self._unattached.parameters if self._together else {}
        if self._together or not self._begun:
            rows += [
                (FROZEN, name, p) for name, p in packing.named_parameters(model) if id(p) not in known and id(p) not in others
            ]  # fmt: skip
        return rows + [(OTHER, name, p) for name, p in others.values()]

    def _buffers(self) -> list[Row]:
        found: list[Row] = []
        for prefix, module in self._model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._NormBase):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if name not in STATISTICS:
                    found.append((BUFFER, f"{prefix}.{name}" if prefix else name, buffer))
        return found


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters of a parameter group that are finite numbers, by name."""
    found: dict[str, float] = {}
    for key, value in group.items():
        several = value if isinstance(value, tuple) else (value,)
        for at, one in enumerate(several):
            number = one.item() if isinstance(one, torch.Tensor) and one.numel() == 1 else one
            if type(number) in (bool, int, float) and math.isfinite(number):
                found[f"{key}[{at}]" if len(several) > 1 else key] = float(number)
    return dict(list(found.items())[:NUMBERS])


class Unattached:
    """What was not given to `attach`: optimizers that make steps, whose parameters are each worker's own, and layers that nobody trains.

    For the thread that trains. torch calls a hook after the step of any optimizer. `several`: the job has other workers.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[torch.Tensor], pairs: Sequence[Pair], several: bool, steps: Stepping
    ) -> None:
        self._model, self._attached, self._pairs, self._several, self._steps = model, parameters, pairs, several, steps
        self._known: set[int] = set()
        """Identities of optimizers that were looked at, which `_kept` keeps from being those of others."""
        self._kept: list[Any] = []
        self.kinds: list[str] = []
        """Classes of those that were found."""
        self.parameters: dict[int, tuple[str, torch.Tensor]] = {}
        """What they train, by identity: name and parameter."""

        self._built: dict[int, torch.Tensor] = {}
        """Parameters of the model as it was attached."""

    def watch(self) -> RemovableHandle:
        """Look at each step from now on, until the handle is removed."""
        self._built = {id(p): p for _, p in packing.named_parameters(self._model)}
        self._known = {id(pair.optimizer) for pair in self._pairs}
        return register_optimizer_step_post_hook(self._stepped)

    def know(self, pair: Pair) -> None:
        """The optimizer of `pair` is attached in place of the others."""
        self._pairs = (pair,)
        self._known.add(id(pair.optimizer))
        self._kept.append(pair.optimizer)

    def look(self) -> None:
        """Say once which layers the script has put into the model since then, and no optimizer of the job trains."""
        known = self._built.keys() | self.parameters.keys()
        new = [name for name, p in packing.named_parameters(self._model) if id(p) not in known and p.grad is not None]
        if new:
            more = f" and {len(new) - 3} more" if new[3:] else ""
            advice.tell_once(
                "replaced",
                f"{', '.join(new[:3])}{more} came into the model after attach. No optimizer of the job trains them, and "
                "final.safetensors has what the model had before. Build all layers before attach",
            )

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
        if id(optimizer) in self._known or threading.get_ident() != self._steps.thread:
            return
        self._known.add(id(optimizer))
        self._kept.append(optimizer)
        attached = {id(p) for p in self._attached}
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in attached]
        if not own:
            if not self._steps.under_way:  # else it is the inner optimizer of one that is attached
                self._tell_of_attached(optimizer)
            return
        names = {id(p): name for name, p in packing.named_parameters(self._model)}
        kind = type(optimizer).__name__
        named = [names.get(id(p), f"of shape {tuple(p.shape)}") for p in own]
        self.kinds.append(kind)
        for name, p in list(zip(named, own, strict=True))[: MOST_UNATTACHED - len(self.parameters)]:
            self.parameters[id(p)] = (f"{name} of {kind}", p)
        if self._several:
            more = f" and {len(named) - 3} more" if named[3:] else ""
            advice.tell_once(
                f"stranger {len(self.kinds)}",
                f"{kind} was not given to attach, and steps {len(own)} parameter{'s' if own[1:] else ''} ({', '.join(named[:3])}{more}). "
                "Each worker trains its own copy of them, and these come apart. Make one module of both, such as torch.nn.ModuleDict, and "
                "one optimizer with a parameter group for each, and attach those",
            )

    def _tell_of_attached(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps what another one trains, as that of a second phase that nobody attached."""
        names = {id(p): name for name, p in packing.named_parameters(self._model)}
        given = [p for group in optimizer.param_groups for p in group["params"]]
        first = names.get(id(given[0]), f"of shape {tuple(given[0].shape)}") if given else "none"
        kind, attached = type(optimizer).__name__, self._pairs[0].plain.__name__
        advice.tell_once(
            f"stranger to {kind}",
            f"{kind} was not given to attach, and steps parameters that the attached {attached} trains ({first} …). These steps are this "
            f"worker's own, and not the job's. Attach it too. {AT_ONCE}",
        )


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number of 32 bits for each tensor, made of all its bytes: of two that differ in one element it differs."""
    made = [_sum(tensor) for tensor in tensors]
    devices = dict.fromkeys(one.device for one in made if one is not None)
    told: dict[int, int] = {}
    for device in devices:  # one answer a device: each would wait for its stream
        rows = [row for row, one in enumerate(made) if one is not None and one.device == device]
        told |= zip(rows, torch.stack([one for row in rows if (one := made[row]) is not None]).tolist(), strict=True)
    return [UNREAD if (found := told.get(row)) is None else _folded(found) for row in range(len(made))]


class Windows:
    """Parts of these tensors, a few a step. They keep their sizes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._ends = list(accumulate(map(_nbytes, tensors)))

    def at(self, clock: int) -> list[tuple[int, int]]:
        """(row, crc32) of LOOKS parts; the same clock chooses the same ones in every process."""
        if not self._ends or not self._ends[-1]:
            return []
        found = []
        for number in range(LOOKS):
            place = _spread(clock * LOOKS + number, self._ends[-1])
            row = bisect_right(self._ends, place)
            flat = _flat(self._tensors[row])
            if flat is None:
                continue
            count = WINDOW // flat.element_size()
            before = self._ends[row - 1] if row else 0
            at = max(0, min((place - before) // flat.element_size(), flat.numel() - count))
            found.append((row, zlib.crc32(memory.view(flat[at : at + count].cpu().contiguous()))))
        return found


def rows_of_part(tensors: Sequence[torch.Tensor], clock: int, most: int = PART) -> list[int]:
    """Rows of the tensors that are summed whole after step `clock`: all, or those of a part of at most about `most` bytes."""
    ends = list(accumulate(map(_nbytes, tensors)))
    parts = -(-(ends[-1] if ends else 0) // most)
    if parts < 2:
        return list(range(len(tensors)))
    chosen = _spread(clock, parts)
    return [row for row, end in enumerate(ends) if min(parts - 1, (end - 1) // most) == chosen]


def grouped_sums(sums_: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(first row, sum) of at most `most` runs of rows, so that a digest of any model fits in a frame."""
    size = max(1, -(-len(sums_) // most))
    if size == 1:
        return list(enumerate(sums_))
    return [(at, zlib.crc32(repr(list(sums_[at : at + size])).encode())) for at in range(0, len(sums_), size)]


def _spread(number: int, below: int) -> int:
    return ((number * _SPREAD) & 0xFFFF_FFFF_FFFF_FFFF) * below >> 64


def _folded(total: int) -> int:
    return (total ^ (total >> 32)) & 0xFFFF_FFFF


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if _is_array(tensor) else 0


def _is_array(tensor: torch.Tensor) -> bool:
    """Is it a plain array with memory, and not empty?"""
    if torch.nn.parameter.is_lazy(tensor) or type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not tensor.is_quantized and tensor.numel() > 0


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its elements, 1-D and contiguous; None of one that is no plain array with memory."""
    if not _is_array(tensor):
        return None
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (torch.Tensor, torch.nn.Parameter)


def _sum(tensor: torch.Tensor) -> torch.Tensor | None:
    """A sum over its bytes as whole numbers, 0-dimensional and on its device."""
    flat = _flat(tensor)
    if flat is None:
        return None
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    each = 8 // flat.element_size()
    if flat.data_ptr() % 8 or flat.storage_offset() % each:
        flat = flat.clone()
    even = flat.numel() // each * each
    rest = flat[even:].view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)
    return rest + flat[:even].view(torch.int64).sum() if even else rest


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            named = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named or platform.processor() or platform.machine()


def processor_of(tensors: Sequence[torch.Tensor]) -> str:
    """The kind of processor that computes with these, in words; workers with different ones may round otherwise."""
    cuda = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return _processor() if cuda is None else torch.cuda.get_device_name(cuda)


MOST_ITEMS: Final = 64
"""Items of a list that are looked at."""
DEEP: Final = 4
"""Things within things."""
LONGEST: Final = 256
"""Characters of a text."""


def facts(loader: Any, seed: int, first: int | None, ordered: bool = False) -> dict[str, Any]:
    """What tells a loader from others; `first` is a checksum of what was read of it first, or of its order where it is `ordered`."""
    data, stream = loader.dataset, isinstance(loader.dataset, torch_data.IterableDataset)
    length = None if stream else _length(data)
    return {
        "loader": type(loader).__name__,
        "data": type(data).__name__,
        "length": length,
        "batch": _batch_size(loader),
        "processes": max(1, loader.num_workers) if stream else None,
        "content": _content(data, length),
        "samples": None if stream or loader.num_workers else _samples(data, length or 0, seed),
        "traits": _traits(data),
        "first": first,
        "ordered": ordered,
    }


def batch_digest(value: Any, before: int = 0, deep: int = 0) -> int:
    """A checksum of some numbers and texts of a batch or sample."""
    if isinstance(value, torch.Tensor) or hasattr(value, "dtype"):
        if tensors := values.tensors_of(value):
            return values.sample_sum(tensors, few=False) ^ zlib.crc32(str(tuple(value.shape)).encode(), before)
        value = value.item() if getattr(value, "ndim", 1) == 0 else value
    if isinstance(value, str | PurePath):
        return zlib.crc32(str(value)[-LONGEST:].rpartition("/")[2].encode(), before)  # the folder may be each machine's own
    if isinstance(value, int | float | bytes | None):
        return zlib.crc32(repr(value)[:LONGEST].encode(), before)
    if deep < DEEP and isinstance(value, Mapping):
        value = [thing for pair in list(value.items())[:MOST_ITEMS] for thing in pair]
    if deep < DEEP and isinstance(value, Sequence):
        before = zlib.crc32(str(len(value)).encode(), before)
        for item in value[:: 1 + len(value) // MOST_ITEMS]:
            before = batch_digest(item, before, deep + 1)
        return before
    return zlib.crc32(type(value).__name__.encode(), before)


def _content(data: Any, length: int | None, deep: int = 0) -> int:
    """A checksum of what holds as much as there are samples."""
    if _is_data(data):
        return batch_digest(data)
    told = 0
    for name, value in sorted(attributes(data).items()):
        several = list(value) if type(value) in (list, tuple) and len(value) <= MOST_ITEMS else [value]
        for one in several:
            if _is_data(one) and length is not None and _length(one) >= length:
                told = batch_digest(one, zlib.crc32(name.encode(), told))
            elif isinstance(one, torch_data.Dataset) and deep < DEEP:
                within = None if isinstance(one, torch_data.IterableDataset) else _length(one)
                told = zlib.crc32(f"{name} {type(one).__name__} {within} {_content(one, within, deep + 1)}".encode(), told)
    return told


def _samples(data: Any, length: int, seed: int) -> int | None:
    """A checksum of three samples; None where they are other ones when they are read again, with the same seeds too."""
    found = []
    with suppress(Exception):  # indices may be no numbers, and what a sample needs may be there in loader processes only
        for _ in range(2):
            with seeded((seed, "look")):
                found.append(batch_digest([data[index] for index in sorted({0, length // 2, length - 1}) if length]))
    return found[0] if len(found) == 2 and found[0] == found[1] else None


def _traits(thing: Any, deep: int = 0) -> int:
    """A checksum of numbers and texts that the data keep, such as a rank; and of objects in them."""
    told = 0
    for name, value in sorted(attributes(thing).items()):
        if isinstance(value, int | float | str | None):
            told = zlib.crc32(f"{name} {value!r}".encode()[:LONGEST], told)
        elif deep < DEEP - 1 and not isinstance(value, torch.nn.Module | torch.Tensor) and attributes(value):
            told = zlib.crc32(f"{name} {_traits(value, deep + 1)}".encode(), told)
    return told


def _is_data(value: Any) -> bool:
    """May it be what samples are made of?"""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, list | tuple | range | dict) or (
        hasattr(value, "dtype") and hasattr(value, "__array__") and hasattr(value, "__len__")
    )


def _batch_size(loader: Any) -> int | None:
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if type(size) is int else None


def _length(data: Any) -> int:
    try:
        return len(data)
    except Exception:  # a class that raises what it likes; a tensor without a dimension
        return -1


STEPS = 16
"""So many steps are looked at."""
BYTES = 1 << 16
"""Of an input."""


class FirstInputs:
    """Looks at the first tensor that the model is given in each of the first steps, until `done` has them.

    If the model itself is not called, as a LightningModule, it is the module that runs first. While a CUDA graph is captured nothing is
    looked at: its values are not there yet.
    """

    def __init__(self, model: torch.nn.Module, done: Callable[[list[int]], None]) -> None:
        self._done = done
        self._sums: list[int] = []
        self._open = 0
        self._first: torch.nn.Module | None = None
        inside = getattr(model, "_orig_mod", model)  # torch.compile cannot trace a hook of the module that it returns
        self._hooks = [before_forward(module, Hook(self._look)) for module in inside.modules()]

    def step(self) -> None:
        """A step was made of what was looked at since the last."""
        if not self._hooks:
            return
        self._sums.append(self._open)
        self._open = 0
        if len(self._sums) == STEPS:
            self.stop()
            self._done(self._sums)

    def stop(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and self._first in (None, module):
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if first is not None and (values := memory.underneath(first)) is not None and values.numel() and not devices.capturing():
                self._first = module
                with torch._C._DisableFuncTorch():
                    self._open = sum_of(values, self._open)


def sum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """A crc32 of the first BYTES of a dense tensor, after that of what came before."""
    part = tensor.detach().reshape(-1)[: BYTES // tensor.element_size()]
    return zlib.crc32(memory.view(memory.contiguous_values(part)), before)
