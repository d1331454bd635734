"""The state of an optimizer whose steps the shards make: scripts that look for it here are told where it is."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

Reconstruction = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class OnShards(dict[Any, Any]):
    """Stands for `optimizer.state`. It is empty to a loop; a look at a parameter's state, and a change, are refused.

    `refuse` ends the process with a sentence.
    """

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()

    def __deepcopy__(self, _memo: object) -> dict[Any, Any]:
        return {}

    def _read(self, *_given: object) -> NoReturn:
        self._refuse(
            "optimizer.state of a parameter: the shards hold it. optimizer.state_dict()['state'] has a copy, by the parameter's number. "
            "Or set training.updateAt: worker"
        )

    def _write(self, *_given: object, **_named: object) -> NoReturn:
        self._refuse(
            "a change of optimizer.state: the shards hold it, and would not see that. Set training.updateAt: worker, so that the script's "
            "own optimizer makes the steps"
        )

    __getitem__ = __contains__ = get = _read
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _write


def reconstruction(kind: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, state: Mapping[int, Any] | None) -> Reconstruction:
    """How pickles and copies make torch's own optimizer of an attached one.

    Args:
        kind: its class before attach.
        optimizer: the attached one.
        state: as `state_dict()["state"]`, by the number of the parameter; None: the optimizer has its own.
    """
    held = dict(kind.__getstate__(optimizer))
    if state is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held["state"] = {parameters[number]: one for number, one in state.items()}
    return copyreg._reconstructor, (kind, object, None), held  # type: ignore[attr-defined]
