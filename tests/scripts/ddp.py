"""What a script computes under torch.distributed: psjob's calls replaced by broadcast and all_reduce over gloo.

As a module: `python -m tests.scripts.ddp WORLD OUT SCRIPT [WORD …]` runs the script in WORLD processes and writes the state_dicts of the
attached models of rank 0 to OUT, a safetensors file; names begin with that given to `attach`, or 0. Who has no batch of its own in a
step is not counted in its mean, as with torch's `Join`.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset

import psjob
from psjob.api.slices import SampleStream, Slices, rounds_of
from tests.support.forks import in_ranks

SECONDS = 240
MODELS: dict[str, torch.nn.Module] = {}
SEED = 0
_own = _given = 0
"""Batches since the last step: this rank's own, and all."""
_absent = False
"""The last of them were others' alone."""
_epochs = 0


def main() -> None:
    world, out, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with tempfile.TemporaryDirectory(prefix="psjob-ddp-") as folder:
        code = in_ranks(world, lambda rank: _rank(rank, world, os.path.join(folder, "store"), out, words))
    raise SystemExit(code)


def _rank(rank: int, world: int, store: str, out: str, words: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    for name, stand_in in (
        ("attach", attach), ("shard", shard), ("rank", lambda: rank), ("world", lambda: world), ("is_first", lambda: rank == 0),
        ("report", lambda **_: None),
    ):  # fmt: skip
        setattr(psjob, name, stand_in)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
    if rank == 0:
        save_file({f"{name}.{key}": value.contiguous().clone() for name, m in MODELS.items() for key, value in m.state_dict().items()}, out)
    dist.barrier()


def attach(model: torch.nn.Module, optimizer: Any, name: str = "0", **_stateful: Any) -> tuple[Any, Any]:
    """The weights of rank 0, and the mean gradient at each step."""
    if isinstance(optimizer, tuple):
        for one in optimizer:
            attach(model, one, name)
        return model, optimizer
    global _epochs
    if MODELS.get(name) is not model:
        _epochs = 0
    MODELS[name] = model
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    plain = type(optimizer)

    def step(self: Any, closure: Any = None) -> Any:
        global _own, _given, _absent
        _absent = not _own if _given else _absent
        _own = _given = 0
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = torch.tensor([0.0 if _absent else 1.0])
        dist.all_reduce(present)
        own = {p: None for group in self.param_groups for p in group["params"]}
        clips = [clip for clip in _clips if own.keys() & set(clip[0])]
        for p in {**own, **{p: None for given, _ in clips for p in given}}:
            has = torch.tensor([0.0 if p.grad is None or _absent else 1.0])
            dist.all_reduce(has)
            if not has or not p.requires_grad:
                continue
            total = torch.zeros_like(p) if p.grad is None or _absent else p.grad.to_dense().clone()
            dist.all_reduce(total)
            p.grad = total / present.item()
        for clip in clips:
            clip[1]()
            _clips[:] = [one for one in _clips if one is not clip]  # tensors do not compare
        if present:
            plain.step(self)
        return loss

    _clip_means()
    optimizer.__class__ = type(plain.__name__, (plain,), {"step": step})
    vars(optimizer).pop("step", None)  # a scheduler that was made before has put the plain one there
    return model, optimizer


def _clip_means() -> None:
    """Under DDP backward leaves the mean, which is what a script clips. Here the mean is taken at the step, so clipping waits for it."""
    from torch.nn import utils

    for function in (utils.clip_grad_norm_, utils.clip_grad_value_):
        (cell,) = function.__closure__
        plain = cell.cell_contents
        if plain.__name__ == "later":
            continue

        def later(parameters: Any, *words: Any, plain: Any = plain, **named: Any) -> torch.Tensor:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _clips.append((given, lambda: plain(given, *words, **named)))
            return torch.zeros(())

        cell.cell_contents = later


_clips: list[Any] = []


def shard(loader: Any, prefetch: Any = None) -> Any:
    """This rank's batches, as psjob gives them."""
    source: Any = (SampleStream if isinstance(loader.dataset, IterableDataset) else Slices)(
        loader, SEED, dist.get_rank(), dist.get_world_size()
    )

    class Part:
        def __len__(self) -> int:
            return rounds_of(len(loader), dist.get_world_size())

        def __getattr__(self, name: str) -> Any:
            return getattr(loader, name)

        def __iter__(self) -> Iterator[Any]:
            global _own, _given, _epochs
            number = _epochs
            _epochs += 1
            feed = source.feed(number, {"round": 0}) if isinstance(source, SampleStream) else source.feed(number, 0)
            for batch, again, *_ in feed:
                if again and not torch.is_grad_enabled():
                    continue
                _own += not again
                _given += 1
                yield batch

    assert isinstance(loader, DataLoader)
    return Part()


if __name__ == "__main__":
    main()
