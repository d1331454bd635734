"""Buffers of a model in a resume record: their forms, which may change as the model trains, and how one is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from psjob.layout import members
from psjob.process.errors import Refused

Form = list[Any]
"""Shape and dtype: `[[8, 4], "float32"]`."""
Forms = Mapping[str, Form | None]


def form(tensor: torch.Tensor) -> Form:
    """Of one buffer."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def forms(model: torch.nn.Module) -> dict[str, Form | None]:
    """Of all buffers of a model, by name."""
    return {name: form(buffer) for name, buffer in members.named_buffers(model)}


class Built:
    """The buffers that a model had when it was attached."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.forms: Forms = forms(model)
        self._unsaved = unsaved(model)

    def shared(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers that are missing in `held` by their name, since they share the tensor of another one by now."""
        if not self.forms.keys() - held:
            return {}
        every = members.named_buffers(self._model, remove_duplicate=False)
        return {name: tensor.detach() for name, tensor in every if name in self.forms and name not in held}

    def changed(self, held: Mapping[str, torch.Tensor], only: Collection[str] | None) -> dict[str, Form | None]:
        """Of those that have another form now, have gone or are new, the form of then; `only` of these, or of all."""
        names = {*self.forms, *held} if only is None else {*self.forms, *held}.intersection(only)
        now = {name: form(tensor) for name, tensor in held.items()}
        return {name: self.forms.get(name) for name in sorted(names) if self.forms.get(name) != now.get(name)}

    def unsaved(self, held: Mapping[str, torch.Tensor]) -> list[str]:
        """Those of `held` that the model's state_dict leaves out."""
        known = self._unsaved if held.keys() <= self.forms.keys() else unsaved(self._model)
        return sorted(known.intersection(held))


def are_forms(value: Any) -> bool:
    """Is this what `Built.changed` gives?"""
    return isinstance(value, dict) and all(
        each is None or (isinstance(each, list) and len(each) == 2 and isinstance(each[0], list) and isinstance(each[1], str))
        for each in value.values()
    )


def unsaved(model: torch.nn.Module) -> set[str]:
    """Names of the buffers that the model's state_dict leaves out (`persistent=False`)."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in getattr(module, "_non_persistent_buffers_set", ())
    }


def put(model: torch.nn.Module, values: Mapping[str, torch.Tensor | None], left_out: Collection[str] = ()) -> None:
    """Give buffers these values: in place if one has its form and can be written, else as another tensor. None: it was not there.

    Names that share a tensor go on sharing one. A buffer that the model does not have is added, with `left_out` from its state_dict.
    Raises Refused if the model has no such module.
    """
    every: dict[str, torch.Tensor | None] = dict(members.named_buffers(model, remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in values.items():
        now = every.get(name)
        with torch.no_grad():
            if now is not None and value is not None and form(now) == form(value) and _copied(now, value):
                continue
            near = next((tensor for tensor in (now, *members.tensors(model)) if tensor is not None), value)
            moved = None if value is None or near is None else value.to(near.device, copy=True)
        for each in [name] if now is None else [other for other, tensor in every.items() if tensor is now]:
            path, _, local = each.rpartition(".")
            _assign(modules.get(path), local, moved, each, name not in left_out)
            every[each] = moved


def _copied(now: torch.Tensor, value: torch.Tensor) -> bool:
    """Write in place, unless torch does not let anybody write into that tensor, such as an expanded one."""
    try:
        now.data.copy_(value)  # a graph that was made in this step may hold it, and checks its version
    except RuntimeError:
        return bool(torch.equal(now, value.to(now.device)))
    return True


def _assign(owner: torch.nn.Module | None, local: str, value: torch.Tensor | None, name: str, persistent: bool) -> None:
    if owner is None:
        if value is not None:
            path = name.rpartition(".")[0]
            raise Refused(f"buffer {name!r} is in the resume record, and the model has no module {path!r}; build the same model")
    elif local in owner._buffers:
        owner._buffers[local] = value
    elif value is not None:
        if hasattr(owner, local):
            delattr(owner, local)
        owner.register_buffer(local, value, persistent=persistent)
