"""Parameters and buffers of a model, as torch's Module finds them: a model's class may give others by the same methods, or other groups.

Names are those of torch's `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def named_parameters(model: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter with its name, tied ones by all of theirs if `remove_duplicate` is false."""
    return torch.nn.Module.named_parameters(model, remove_duplicate=remove_duplicate)


def named_buffers(model: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of buffers."""
    return torch.nn.Module.named_buffers(model, remove_duplicate=remove_duplicate)


def tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, and then all buffers."""
    return [*(p for _, p in named_parameters(model)), *(buffer for _, buffer in named_buffers(model))]
