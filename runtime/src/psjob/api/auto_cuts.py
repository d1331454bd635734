"""`cuts="auto"`: worker 0 profiles the model and solves where to cut it, shard 0 keeps that, and every worker cuts so."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from psjob import contract
from psjob.modes.stages import ChosenCuts
from psjob.pipeline.cuts import beginnings, split_model
from psjob.planning.plan import Grid, ModelWork, PipelineWay, Profile, Wire, in_blocks, profile_of
from psjob.planning.predict import Case, Prediction
from psjob.planning.solve import solve
from psjob.process import system
from psjob.process.config import Config, ProcessContext
from psjob.process.errors import Refused, leave_message
from psjob.worker import rendezvous

AUTO = "auto"
LINK = Wire(1.25e9, 50e-6)
"""Between any two processes: nobody has measured it before the job begins. 10 Gbit/s."""
COPIES, ROOM = 3, 0.8
"""A model is run for real where its weights, their gradient and as much again take no more than this share of the free memory."""
PIN = "name the cuts in ps.pipeline(…, cuts=[…]) or in spec.stages[].cut"
Example = tuple[tuple[Any, ...], dict[str, Any]]
log = logging.getLogger("psjob.worker")


def is_auto(cuts: object) -> bool:
    """Are cuts left to psjob?"""
    return isinstance(cuts, str) and cuts == AUTO


def decided_cuts(place: ProcessContext, model: nn.Module, microbatches: int, example: Example | None) -> tuple[str, ...]:
    """The job's cuts. Raises Refused if there are none, and SystemExit where none came in time."""
    config = place.config
    if example is None:
        raise Refused('cuts="auto" runs the model to see what its modules take: give example=x of one micro-batch, or ' + PIN)
    try:
        chosen = rendezvous.agreed(place, lambda: choose_cuts(config, model, microbatches, example, room_of(model)))
    except rendezvous.NoCuts as late:
        print(f"psjob: {late}", file=sys.stderr, flush=True)
        leave_message({"error": str(late)})
        raise SystemExit(contract.EXIT_RETRY) from None
    log.info("%s", chosen.told(config.stage_names))
    return chosen.cuts


def choose_cuts(config: Config, model: nn.Module, microbatches: int, example: Example, room: float | None) -> ChosenCuts:
    """Profile the model, and solve. `room`: bytes of a worker. Raises Refused if no cuts would do."""
    made = profile(model, example)
    names = [node.name for node in made.nodes]
    cuts = beginnings(model, names)
    blocks = in_blocks(made, lambda i: cuts[i])
    answer = solved(blocks, config.stages.replicas, planned_way(config, microbatches), room)
    found = tuple(blocks.nodes[stage.first].name for stage in answer.plan[1:])
    try:
        split_model(model, found, example)
    except ValueError as error:
        raise Refused(f'cuts="auto" would cut at {", ".join(found)}, and that cannot be: {error}; {PIN}') from error
    try:
        return ChosenCuts.from_json(ChosenCuts(found, answer.microbatch * microbatches).to_json(), len(config.stages.replicas))
    except ValueError as error:  # shard 0 would not keep them
        raise Refused(f'cuts="auto": {error}; {PIN}') from error


def solved(profile: Profile, replicas: tuple[int, ...], way: PipelineWay, room: float | None) -> Prediction:
    """The best plan of a model in blocks, for stages of so many workers. Raises Refused if there is none."""
    stages, count = len(replicas), sum(replicas)
    if len(profile.nodes) < stages:
        raise Refused(
            f'cuts="auto": {profile.model or "the model"} has {len(profile.nodes)} modules that a stage could begin with and that train '
            f"parameters, and spec.stages has {stages} stages; take fewer stages, or {PIN}"
        )
    grid = Grid(count, 1, LINK, LINK, False, 2 / LINK.bandwidth)
    case = Case(ModelWork(profile), grid, way, room)
    answer = solve(case, shape=replicas)
    if answer is not None:
        return answer
    least = solve(Case(case.work, grid, way), shape=replicas)
    if room is None or least is None:
        raise Refused(f'cuts="auto" has found no cuts into {stages} stages; {PIN}')
    raise Refused(
        f'cuts="auto": no cuts into {stages} stages fit workers with {room / 2**20:.0f} MiB for the model, and the fastest ones need '
        f"{least.memory / 2**20:.0f} MiB. Take more stages, more micro-batches or a larger limit, or {PIN}"
    )


def planned_way(config: Config, microbatches: int) -> PipelineWay:
    """How the planner calls what the job does. An update is one of all micro-batches, whatever the schedule."""
    recompute = config.stage_weights == "recompute"
    if config.flushes:
        return PipelineWay("flush", microbatches, recompute=recompute)
    return PipelineWay(config.schedule, accumulate=microbatches, recompute=recompute)


def profile(model: nn.Module, example: Example) -> Profile:
    """What each module takes: measured here, or by FLOPs where the model has no memory or would not fit. Raises Refused."""
    from psjob.profiling.find import Found, Unfound
    from psjob.profiling.profile import profiled

    args, kwargs = example
    try:
        if on_meta := _too_large(model):
            made = profiled(Found(_without_memory(model), _to_meta(args), _to_meta(kwargs), meta=on_meta))
        else:
            with _untouched(model):
                made = profiled(Found(model, args, kwargs))
    except Unfound as error:
        raise Refused(f'cuts="auto": {error}; or {PIN}') from error
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise Refused(f'cuts="auto" cannot run {type(model).__name__} on its example: {type(error).__name__}: {said}; {PIN}') from error
    return profile_of(made)


def room_of(model: nn.Module) -> float | None:
    """Bytes that a worker like this one has for its stage; None: nobody limits them."""
    first = next((one for one in model.parameters() if not one.is_meta), None)
    if first is not None and first.is_cuda:
        return float(torch.cuda.get_device_properties(first.device).total_memory)
    most, own = system.memory_limit(), system.resident_memory()
    if most is None or own is None:
        return None
    held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()) if not one.is_meta)
    return float(max(0, most - max(0, own - held)))


def _too_large(model: nn.Module) -> bool:
    if any(one.is_meta for one in (*model.parameters(), *model.buffers())):
        return True
    left = system.memory_left()
    return left is not None and COPIES * sum(one.nbytes for one in model.parameters()) > ROOM * left


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy with every tensor on the meta device; those that are shared stay shared."""
    copies: dict[int, Any] = {id(one): nn.Parameter(one.detach().to("meta"), one.requires_grad) for one in model.parameters()}
    copies |= {id(one): one.detach().to("meta") for one in model.buffers()}
    return copy.deepcopy(model, copies)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: _to_meta(one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_to_meta(one) for one in value)
    return value


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """What passes change is put back: buffers, also those that a module replaces, gradients, torch's random numbers."""
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(one, one.clone()) for one in model.buffers()]
    grads = [(one, one.grad) for one in model.parameters()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for p, grad in grads:
                p.grad = grad
            for own, before in held:
                own.clear()
                own.update(before)
            with torch.no_grad():
                for one, value in buffers:
                    one.copy_(value)
