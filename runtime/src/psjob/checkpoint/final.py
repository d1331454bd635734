"""final.safetensors: the trained model as one file that outlives every pod."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from psjob.checkpoint import files, manifest
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.checkpoint.files import DeferredTensor, FileFact
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.states import final_rows
from psjob.contract import FINAL_WEIGHTS
from psjob.layout import memory
from psjob.layout.blocks import Layout

TRIES = 3
"""For a checkpoint that is pruned while it is read."""


def write_final(folder: Path, made: Manifest, aliases: Mapping[str, str] | None = None, source: Path | None = None) -> FileFact:
    """Write `folder/final.safetensors` from the checkpoint `made` in `source` (default: `folder`): parameters and buffers.

    Equal weights, buffers and steps give the same bytes, whatever the run is called.
    `aliases` gives further names of tied parameters: {name in the state_dict: name in the table}; each is written in full, as the
    format forbids shared bytes. Raises CheckpointProblem or Damage.
    """
    source = source or folder
    with _Blocks(source, made) as blocks:
        # No name of the run and no time: equal weights after equal steps are equal files.
        return files.write_blocks(folder, FINAL_WEIGHTS, _entries(source, made, aliases, blocks), {"format": "pt", "step": str(made.step)})


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of `final.safetensors`, or before there is one what it would hold of the newest checkpoint; empty without either.

    A job that runs commits others meanwhile, and removes old ones: then the next one is read. Raises CheckpointProblem or Damage.
    """
    for again in reversed(range(TRIES)):
        if (folder / FINAL_WEIGHTS).exists():
            return files.read_blocks(folder / FINAL_WEIGHTS)
        if not folder.is_dir():
            return {}
        made, problems = manifest.newest_manifest(folder, None, whole=False)
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
        if made is None:
            if problems:
                raise CheckpointProblem(problems[0])
            return {}
        try:
            with _Blocks(folder, made) as blocks:
                entries = _entries(folder, made, made.extra.get("aliases"), blocks)
                return {name: one if isinstance(one, torch.Tensor) else one.make().view(one.shape) for name, one in entries}
        except CheckpointProblem:
            if not again or (folder / made.name).exists():
                raise
    return {}


def _entries(
    source: Path, made: Manifest, aliases: Mapping[str, str] | None, blocks: _Blocks
) -> list[tuple[str, torch.Tensor | DeferredTensor]]:
    names = {spec.name: row for row, spec in enumerate(made.layout.table)}
    wanted = dict(names)
    for alias, name in (aliases or {}).items():
        if name not in names:
            raise Damage(made.name, f"tied parameter {alias}", f"no parameter {name} in the table")
        wanted[alias] = names[name]
    for table in made.rows.specs if made.rows is not None else ():
        wanted.pop(f"{table.name}.anchor", None)  # the plain module has none
    entries: list[tuple[str, torch.Tensor | DeferredTensor]] = []
    for name, row in wanted.items():
        spec = made.layout.table[row]
        entries.append((name, DeferredTensor(spec.dtype, spec.shape, functools.partial(blocks.tensor, row))))
    if made.buffers is not None:
        buffers = files.read_blocks(source / made.buffers.name, None, made.buffers)
        entries += [(name, tensor) for name, tensor in buffers.items() if name not in wanted]
    return [*entries, *final_rows(source, made)]


def weights_sha256(layout: Layout, blocks: Mapping[int, torch.Tensor]) -> str:
    """Sha256 in hex of the parameters' bytes in table order, from the flat weights of every block."""
    digest = hashlib.sha256()
    for row in range(len(layout.table)):
        for block, piece in layout.pieces_of(row):
            flat = blocks[block.index].detach().to("cpu").contiguous()
            size = flat.element_size()
            digest.update(memory.view(flat)[piece.block_offset * size : (piece.block_offset + piece.length) * size])
    return digest.hexdigest()


def tensors_sha256(tensors: Iterable[torch.Tensor]) -> str:
    """The same of a plain model: its parameters in table order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().to("cpu").contiguous()
        digest.update(memory.view(flat))
    return digest.hexdigest()


def checkpoint_sha256(folder: Path, made: Manifest) -> str:
    """The same of a checkpoint on disk, and after the parameters of its tables' rows, as `final_rows` has them.

    Raises Damage or CheckpointProblem.
    """
    with _Blocks(folder, made) as blocks:
        parameters = (blocks.tensor(row) for row in range(len(made.layout.table)))
        return tensors_sha256(itertools.chain(parameters, (held.make() for _, held in final_rows(folder, made))))


class _Blocks:
    """Parameters put together from the files of a checkpoint, one at a time; the last block read is kept."""

    def __init__(self, folder: Path, made: Manifest) -> None:
        self._folder, self._made = folder, made
        self._places = {place.index: place for place in made.blocks}
        self._kept: tuple[int, torch.Tensor] | None = None
        self._readers: dict[str, files.Reader] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tensor(self, row: int) -> torch.Tensor:
        spec = self._made.layout.table[row]
        whole = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype), device="cpu")
        for block, piece in self._made.layout.pieces_of(row):
            part = self._weights(block.index)[piece.block_offset : piece.block_offset + piece.length]
            whole[piece.tensor_offset : piece.tensor_offset + piece.length].copy_(part)
        return whole.view(spec.shape)

    def _weights(self, index: int) -> torch.Tensor:
        if self._kept is None or self._kept[0] != index:
            file = self._places[index].file
            if file not in self._readers:
                self._readers[file] = self._stack.enter_context(files.opened_checkpoint_file(self._folder / file, self._made.fact(file)))
            self._kept = (index, self._readers[file].read(f"{index}.weights"))
        return self._kept[1]
