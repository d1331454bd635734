"""`psjob plan-stages`: where to cut a model into pipeline stages, on which devices they run, and what a step takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from psjob.planning.plan import WAYS, Grid, ModelWork, PipelineWay, Plan, PlannedStage, Profile, cuts_of, devices_of, plan_by_hand
from psjob.planning.predict import Case, Figures, Prediction, alone, predict, way_fits
from psjob.planning.solve import SOLVERS, least_memory, solve
from psjob_client.cli.output import TextForm, TextOutput, echo, emit, table
from psjob_client.cli.topology import Hosts, Preset, Probe, Servers, machines_of
from psjob_client.local.manifest import read_text
from psjob_client.local.measure import profile_script
from psjob_client.problems import BadInput
from psjob_client.stages import ProfileFile, grid_of, read_profile
from psjob_client.topology.machine import FIGURES, Machine, NoWay, parse_size, show_bytes, show_seconds

EXAMPLES = """Examples:

  psjob plan-stages train.py --preset ethernet-10 --workers 4 --memory 16GiB

  psjob plan-stages train.py:build --machine rack.yaml --save profile.json

  psjob plan-stages --profile profile.json --machine rack.yaml --way 2bw --accumulate 8 -o json

  psjob plan-stages --profile profile.json --machine rack.yaml --cuts layers.4,layers.8 --replicas 2,1,1

  psjob plan-stages big.py:build --meta --preset ethernet-100 --workers 8 --memory 80GB --recompute

train.py is run until its first optimizer.step(). train.py:build is a function that returns a model, example inputs and perhaps a loss.

Exit codes: 0 done, 1 the plan given by --cuts needs more memory than --memory, 2 bad input."""
MOST_DEVICES = 32
MOST_MICROBATCHES, MOST_ACCUMULATED = 1024, 10_000
EXIT_TOO_LARGE = 1
NOT_YET = "No PSTrainingJob trains so yet: jobs give a device one stage, push once a batch, and do not recompute with 2bw."
COLUMNS = ("stage", "modules", "devices", "forward", "backward", "sends", "update", "in flight", "memory", "idle")


def plan_stages(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT[:FUNCTION]", help="A training script, or a function that builds its model.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="A profile that --save wrote, in place of a script.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the profile here, as JSON.")] = None,
    meta: Annotated[bool, typer.Option("--meta", help="Build the model without memory; seconds are estimated from FLOPs.")] = False,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="How long the script may take.")] = 300.0,
    machine: Annotated[Path | None, typer.Option(metavar="FILE", help="A machine, described (docs/topology.md).")] = None,
    preset: Preset = None,
    workers: Hosts = None,
    servers: Servers = None,
    probe: Probe = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes of a device, such as 16GiB; no limit by default.")] = None,
    way: Annotated[str, typer.Option(help=f"How stages train: {', '.join(WAYS)} (docs/stages.md).")] = "flush",
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Micro-batches of a flush; 8 by default.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help="Flushes (micro-batches, without a flush) a push; 1 by default, with 2bw one a device.")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Keep only the inputs of stages and run forward passes again.")] = False,
    solver: Annotated[
        str, typer.Option(help="pipedream: stages with replicas. mixed: devices with several stages, no replicas.")
    ] = "pipedream",
    seed: Annotated[int, typer.Option(help="Of the mixed solver.")] = 0,
    cuts: Annotated[
        str | None, typer.Option(metavar="A,B", help="Judge this plan: modules at which a stage begins, but the first.")
    ] = None,
    replicas: Annotated[str | None, typer.Option(metavar="N,N,N", help="Of the stages of --cuts; 1 each by default.")] = None,
    form: TextOutput = TextForm.text,
) -> None:
    """Profile a model, cut it into pipeline stages for a machine, and predict time, idle share and memory."""
    room = _memory(memory)
    chosen = _way(way, microbatches, accumulate, recompute)
    if solver not in SOLVERS:
        raise BadInput(f"--solver {solver}: no solver; known are {', '.join(SOLVERS)}")
    if replicas is not None and cuts is None:
        raise BadInput(f"--replicas {replicas}: goes with --cuts; give the modules at which stages begin")
    described, grid = _machine(machine, preset, workers, servers, probe)
    chosen = chosen if accumulate is not None or chosen.name != "2bw" else PipelineWay("2bw", accumulate=grid.count, recompute=recompute)
    found = _profile(script, args or [], profile, save, meta, deadline)
    case = Case(ModelWork(found), grid, chosen, room)
    answer = predict(case, _by_hand(case, cuts, replicas)) if cuts is not None else _solved(case, solver, seed)
    if form is TextForm.json:
        emit(json.dumps(_as_json(case, described, answer), indent=2) + "\n")
    else:
        _show(case, described, answer, "plan" if cuts is not None else "pick")
    if room is not None and answer.memory > room:
        raise typer.Exit(EXIT_TOO_LARGE)


def _memory(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadInput(f"--memory {text}: {str(error).replace('160MB or 64KiB', '16GiB')}") from None


def _way(name: str, microbatches: int | None, accumulate: int | None, recompute: bool) -> PipelineWay:
    if name not in WAYS:
        raise BadInput(f"--way {name}: no way to train stages; known are {', '.join(WAYS)}")
    if microbatches is not None and name != "flush":
        raise BadInput(f"--microbatches {microbatches}: only --way flush has a number of them; with {name} they never end, so leave it out")
    for option, value, most in (("--microbatches", microbatches, MOST_MICROBATCHES), ("--accumulate", accumulate, MOST_ACCUMULATED)):
        if value is not None and not 1 <= value <= most:
            raise BadInput(f"{option} {value}: must be 1..{most}")
    return PipelineWay(name, microbatches or 8, accumulate or 1, recompute)


def _machine(path: Path | None, preset: str | None, workers: int | None, servers: int | None, probe: int | None) -> tuple[Machine, Grid]:
    machines = machines_of(path, preset, workers, servers, probe, FIGURES, "--machine FILE")
    if len(machines) > 1:
        raise BadInput(
            f"{len(machines)} machines given ({', '.join(one.name for one in machines)}); stages are planned for one: --preset dgx1"
        )
    (found,) = machines
    try:
        grid = grid_of(found)
    except (NoWay, ValueError) as error:
        raise BadInput(f"{found.name}: {error}") from None
    if grid.count > MOST_DEVICES:
        raise BadInput(f"{found.name}: {grid.count} devices, stages are planned for at most {MOST_DEVICES}; describe a part of the machine")
    return found, grid


def _profile(script: str | None, args: Sequence[str], file: Path | None, save: Path | None, meta: bool, deadline: float) -> Profile:
    if (script is None) == (file is None):
        told = f"{script} and --profile given" if script is not None else "no model given"
        raise BadInput(f"{told}: give one of train.py, train.py:build and --profile FILE")
    if file is not None:
        if meta:
            raise BadInput("--meta: goes with a script; a profile has its figures already")
        return _read(_json(file), str(file)).profile()
    if not 0 < deadline <= 86_400:
        raise BadInput(f"--deadline {deadline:g}: must be more than 0 and at most 86400 seconds")
    assert script is not None
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"profiling {script}"):
            raw = profile_script(script, args, meta=meta, deadline=deadline)
    else:
        raw = profile_script(script, args, meta=meta, deadline=deadline)
    found = _read(raw, script)
    if save is not None:
        try:
            save.write_text(json.dumps(found.to_manifest(), indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"--save {save}: cannot be written: {error.strerror or error}; give another path") from None
    return found.profile()


def _json(file: Path) -> Any:
    try:
        return json.loads(read_text(file, "a profile that `psjob plan-stages --save` wrote"))
    except (ValueError, RecursionError):
        raise BadInput(f"{file}: is not JSON; give a profile that `psjob plan-stages --save` wrote") from None


def _read(raw: Any, where: str) -> ProfileFile:
    found, problems = read_profile(raw)
    if found is None:
        raise BadInput(*(f"{where}: {problem}" for problem in problems))
    return found


def _by_hand(case: Case, cuts: str, replicas: str | None) -> Plan:
    names = [cut for cut in cuts.split(",") if cut]
    try:
        given = [int(word) for word in replicas.split(",")] if replicas is not None else []
    except ValueError:
        raise BadInput(f"--replicas {replicas}: must be numbers such as 2,1,1") from None
    try:
        plan = plan_by_hand(case.work.profile, names, given, case.grid.count)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if len(plan) > case.grid.count:
        raise BadInput(f"--cuts {cuts}: {len(plan)} stages, the machine has {case.grid.count} devices; drop a cut")
    if not way_fits(case.way, len(plan)):
        raise BadInput(f"--accumulate {case.way.accumulate}: 2bw needs at least one micro-batch a stage; give {len(plan)} or more")
    return plan


def _solved(case: Case, solver: str, seed: int) -> Prediction:
    answer = solve(case, solver, seed)
    if answer is not None:
        return answer
    assert case.memory is not None, "without a limit one device is always a plan"
    least, room = show_bytes(least_memory(case)), show_bytes(case.memory)
    more = "" if case.way.recompute else ", --recompute"
    raise BadInput(
        f"--memory {room}: no plan fits on {case.grid.count} devices, and about {least} a device would do; "
        f"give more memory, more devices, a smaller batch{more} or another --way"
    )


def _show(case: Case, machine: Machine, answer: Prediction, word: str) -> None:
    profile, way = case.work.profile, case.way
    echo(f"{profile.model or 'model'} on {machine.name}: {case.grid.count} devices, {_how(way)}{_batch(profile)}")
    echo(f"profile: {profile.device or 'not said'}; {len(profile.nodes)} modules\n")
    table(COLUMNS, [_row(case, k, figures) for k, figures in enumerate(answer.stages)])
    echo(f"\n{_time(case, answer)}")
    echo(_compared(case, answer))
    if case.memory is not None and answer.memory > case.memory:
        echo(f"does not fit: a device needs {show_bytes(answer.memory)}, --memory is {show_bytes(case.memory)}")
    if len(answer.plan) == 1:
        many = answer.plan[0].replicas
        echo(f"{word}: no cut; an ordinary job with workers.replicas: {many}")
        return
    cuts, replicas = cuts_of(profile, answer.plan), [stage.replicas for stage in answer.plan]
    numbers = ",".join(str(number) for number in replicas)
    if len(devices_of(answer.plan)) < sum(replicas):
        homes = ",".join(_device(case.grid, stage.devices[0]) for stage in answer.plan)
        echo(f"{word}: {len(answer.plan)} stages; cuts: {','.join(cuts)}; devices: {homes}\n{NOT_YET}")
        return
    echo(f"{word}: {len(answer.plan)} stages; cuts: {','.join(cuts)}; replicas: {numbers}\n{_manifest(case.way, cuts, replicas)}")
    if word == "pick" and answer.plan == plan_by_hand(profile, cuts, replicas, case.grid.count):
        echo(f"to judge it again: --cuts {','.join(cuts)} --replicas {numbers}")


def _manifest(way: PipelineWay, cuts: Sequence[str], replicas: Sequence[int]) -> str:
    """What to paste into the spec of a PSTrainingJob."""
    if (way.flushes and way.accumulate != 1) or (way.name == "2bw" and way.recompute):
        return NOT_YET
    shared = lcm(*replicas)
    microbatches = way.microbatches if way.flushes else -(-way.accumulate // shared) * shared
    words = [f"microbatches: {microbatches}"]
    words += [] if way.flushes else [f"schedule: {way.name}"]
    words += ["weights: recompute"] if way.recompute else []
    lines = ["in a PSTrainingJob:", "  spec:", "    stages:", f"    - {{name: stage-0, replicas: {replicas[0]}}}"]
    lines += [f"    - {{name: stage-{k}, cut: {json.dumps(cut)}, replicas: {replicas[k]}}}" for k, cut in enumerate(cuts, 1)]
    return "\n".join([*lines, f"    training: {{pipeline: {{{', '.join(words)}}}}}"])


def _how(way: PipelineWay) -> str:
    text = f"flush of {way.microbatches} micro-batches" if way.flushes else way.name
    text += f", {way.accumulate} a push" if way.accumulate > 1 else ""
    return text + (", recompute" if way.recompute else "")


def _batch(profile: Profile) -> str:
    return f"; a micro-batch is {profile.samples} samples" if profile.samples else ""


def _row(case: Case, k: int, figures: Figures) -> tuple[str, ...]:
    return (
        str(k),
        _modules(case.work.profile, figures.stage),
        ",".join(_device(case.grid, device) for device in figures.stage.devices),
        show_seconds(figures.forward),
        show_seconds(figures.backward),
        show_bytes(figures.sent) if figures.sent else "-",
        show_seconds(figures.update),
        str(figures.in_flight),
        show_bytes(figures.memory),
        _share(figures.idle),
    )


def _modules(profile: Profile, stage: PlannedStage) -> str:
    first, last = profile.nodes[stage.first].name, profile.nodes[stage.end - 1].name
    return first if stage.end - stage.first == 1 else f"{first} … {last} ({stage.end - stage.first})"


def _device(grid: Grid, device: int) -> str:
    return grid.names[device] if grid.names else str(device)


def _share(part: float) -> str:
    return f"{100 * max(0.0, part):.0f} %"


def _time(case: Case, answer: Prediction) -> str:
    samples = case.work.profile.samples
    rate = f", {samples / answer.microbatch:.4g} samples/s" if samples else ""
    step = f"step of {answer.microbatches}: {show_seconds(answer.step)}, " if case.way.flushes else ""
    text = f"{step}{show_seconds(answer.microbatch)} a micro-batch{rate}; devices idle {_share(answer.idle)}"
    if case.way.flushes and len(answer.plan) > 1:
        stages = len(answer.plan)
        text += f", bubble of equal stages (K-1)/(M+K-1) {_share((stages - 1) / (case.way.microbatches + stages - 1))}"
    return f"{text}; most memory of a device {show_bytes(answer.memory)}"


def _compared(case: Case, answer: Prediction) -> str:
    one = alone(case)
    text = f"one device: {show_seconds(one)} a micro-batch, {one / answer.microbatch:.2f}×"
    whole = (PlannedStage(0, case.work.count, tuple(range(case.grid.count))),)
    if answer.plan == whole:
        return text
    every = predict(case, whole)
    fits = case.memory is None or every.memory <= case.memory
    text += f"; the whole model on each of {case.grid.count} devices: {show_seconds(every.microbatch)}, "
    return text + f"{every.microbatch / answer.microbatch:.2f}×" + ("" if fits else f", and {show_bytes(every.memory)} do not fit")


def _as_json(case: Case, machine: Machine, answer: Prediction) -> Mapping[str, Any]:
    profile, way = case.work.profile, case.way
    return {
        "machine": machine.to_manifest(),
        "model": profile.model,
        "estimated": profile.estimated,
        "way": {
            "name": way.name,
            "microbatches": way.microbatches if way.flushes else None,
            "accumulate": way.accumulate,
            "recompute": way.recompute,
        },
        "stepSeconds": answer.step,
        "microbatches": answer.microbatches,
        "microbatchSeconds": answer.microbatch,
        "idle": answer.idle,
        "memory": answer.memory,
        "fits": case.memory is None or answer.memory <= case.memory,
        "aloneSeconds": alone(case),
        "cuts": cuts_of(profile, answer.plan),
        "replicas": [stage.replicas for stage in answer.plan],
        "stages": [
            {
                "modules": [node.name for node in profile.nodes[one.stage.first : one.stage.end]],
                "devices": [_device(case.grid, device) for device in one.stage.devices],
                "forwardSeconds": one.forward,
                "backwardSeconds": one.backward,
                "sendsBytes": one.sent,
                "sendSeconds": one.sending,
                "updateSeconds": one.update,
                "weightsBytes": one.weights,
                "inFlight": one.in_flight,
                "memory": one.memory,
                "idle": one.idle,
            }
            for one in answer.stages
        ],
    }
