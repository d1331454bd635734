"""Rows in a file of a model's weights, by the names that a plain module has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from psjob.checkpoint.files import Entry, PartedTensor
from psjob.embeddings.lookup import Lookup


def exported(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> list[Entry]:
    """The tensors of `state`, which is the model's, with the rows of its modules in place of their anchors.

    Rows are read when they are written, part by part. A module that the model has twice is written twice, as a plain one is. Raises
    ValueError for a module that is not attached.
    """
    held = {path: module for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, Lookup)}
    anchors = {_name(path, "anchor") for path in held}
    entries: list[Entry] = [(name, tensor) for name, tensor in state.items() if name not in anchors]
    for path, module in held.items():
        if not module.steps:
            raise ValueError(f"the rows of {path or 'the model'} begin with ps.attach: call it before ps.export")
        ids = module.ids() if module.num_rows is None else None
        if ids is not None:
            entries.append((_name(path, "ids"), ids))
        count = module.num_rows if ids is None else len(ids)
        assert count is not None
        entries.append((_name(path, "weight"), PartedTensor(module.dtype, (count, module.dim), functools.partial(module.parts, ids))))
    return entries


def unwinding(model: torch.nn.Module, call: Callable[[], None]) -> None:
    """Make a call that reads rows of `model`, if it has any: where the job ends or begins again meanwhile, the call is left first."""
    held = next((module for module in model.modules() if isinstance(module, Lookup)), None)
    if held is None:
        call()
    else:
        held.unwinding(call)


def _name(path: str, what: str) -> str:
    return f"{path}.{what}" if path else what
