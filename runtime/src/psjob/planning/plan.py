"""A plan: which modules are a stage, and which devices run it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from psjob.planning.profile import Profile


@dataclass(frozen=True)
class Stage:
    """The modules [first, end), on one device a replica; micro-batch m goes to replica m mod r."""

    first: int
    end: int
    devices: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """r of the stage."""
        return len(self.devices)


Plan = tuple[Stage, ...]
"""Stages in order; together they are the whole model."""


def devices_of(plan: Plan) -> list[int]:
    """Each device that has a stage, once."""
    return sorted({device for stage in plan for device in stage.devices})


def cuts_of(profile: Profile, plan: Plan) -> list[str]:
    """The first module of each stage but the first."""
    return [profile.nodes[stage.first].name for stage in plan[1:]]


def plan_by_hand(profile: Profile, cuts: Sequence[str], replicas: Sequence[int], count: int) -> Plan:
    """Stages that begin at the modules `cuts`, on the first of `count` devices, in order.

    Raises ValueError: a module that is not there, an order that is not the model's, more replicas than devices.
    """
    names = [node.name for node in profile.nodes]
    bounds = [0]
    for cut in cuts:
        if cut not in names:
            near = difflib.get_close_matches(cut, names, n=1)
            raise ValueError(
                f"--cuts {cut}: no module of the profile; {f'did you mean {near[0]}?' if near else f'known are {_some(names)}'}"
            )
        if names.index(cut) <= bounds[-1]:
            before = f"comes before {names[bounds[-1]]}" if len(bounds) > 1 else "is the first module, where the first stage begins anyway"
            raise ValueError(f"--cuts {cut}: {before}; name modules in the order of the profile")
        bounds.append(names.index(cut))
    given = list(replicas) or [1] * len(bounds)
    if len(given) != len(bounds):
        raise ValueError(f"--replicas {_list(given)}: {len(given)} numbers for {len(bounds)} stages; give one for each stage")
    if min(given) < 1:
        raise ValueError(f"--replicas {_list(given)}: each must be at least 1; drop a cut to have fewer stages")
    if sum(given) > count:
        raise ValueError(f"--replicas {_list(given)}: {sum(given)} devices in all, the machine has {count}; give fewer, or another machine")
    stages, device = [], 0
    for first, end, many in zip(bounds, [*bounds[1:], len(names)], given, strict=True):
        stages.append(Stage(first, end, tuple(range(device, device + many))))
        device += many
    return tuple(stages)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
