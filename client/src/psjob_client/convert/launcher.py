"""Takes a launcher's command line apart: torchrun, torch.distributed.run and launch as modules, or `accelerate launch`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from psjob_client.problems import BadInput

MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run"})
OTHERS = {
    "deepspeed": "psjob starts one process a worker and has no DeepSpeed engine",
    "mpirun": "psjob has no MPI",
    "mpiexec": "psjob has no MPI",
    "horovodrun": "psjob has no Horovod",
}
"""Launchers that are known and not taken apart."""
FLAGS = ("standalone", "module", "no-python", "run-path", "use-env", "virtual-local-rank")
NUMBERS = ("nnodes", "nproc-per-node", "node-rank", "max-restarts")
TEXTS = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "monitor-interval", "start-method", "event-log-handler", "role", "log-dir",
    "redirects", "tee", "local-ranks-filter", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle",
    "duplicate-stdout-filters", "duplicate-stderr-filters", "log-line-prefix-template", "shutdown-timeout",
)  # fmt: skip
SHORT = {"m": "module", "r": "redirects", "t": "tee"}
MEANT = frozenset({"nnodes", "nproc-per-node", "max-restarts", "module", "no-python", "use-env", "standalone", "run-path"})
"""Options that the manifest says in other words, or that say nothing any more."""
MEETING = "workers find the shards by themselves; leave it out"
LOGS = "each process has its log: kubectl logs, or .psjob/<run>/logs"
WHY = {
    "redirects": LOGS, "tee": LOGS, "log-dir": LOGS, "local-ranks-filter": LOGS, "logs-specs": LOGS,
    "duplicate-stdout-filters": LOGS, "duplicate-stderr-filters": LOGS,
    "log-line-prefix-template": LOGS, "shutdown-timeout": "a pod has terminationGracePeriodSeconds to end in",
    "numa-binding": "processes are not bound; use the kubelet's topology manager",
    "start-method": "each worker is a process of its own",
    "signals-to-handle": "SIGTERM asks a worker to leave after its step",
}  # fmt: skip
TAKEN_VALUES = ("num_processes", "num_machines", "mixed_precision", "gradient_accumulation_steps", "max_restarts", "config_file")
"""Options of `accelerate launch` with a value that a manifest says in other words."""
TAKEN_FLAGS = ("multi_gpu", "cpu", "module", "no_python", "quiet", "same_network")
DROPPED_VALUES = (
    "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "monitor_interval", "gpu_ids", "tee", "role",
    "log_dir", "num_cpu_threads_per_process", "dynamo_backend",
)  # fmt: skip
SET_BY = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}
"""The variables by which `accelerate launch` tells a script of its options."""
ACCELERATE_WHY = {
    "config_file": "is not read here: write what it says as options, such as --num_processes 4",
    "gpu_ids": "a worker's GPUs are its resources: set limits of nvidia.com/gpu",
    "num_cpu_threads_per_process": "set OMP_NUM_THREADS in the container's env",
    "dynamo_backend": "call torch.compile in the script",
    "tee": LOGS, "log_dir": LOGS,
}  # fmt: skip
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Launch:
    """What a launcher would start."""

    command: tuple[str, ...]
    """Of one process: [python, train.py, …]."""
    env: tuple[tuple[str, str], ...]
    """Assignments before the command."""
    nodes: str | None
    """As written: `2`, or `1:4`."""
    processes: str | None
    """On each node, as written: a number, auto, gpu or cpu."""
    restarts: int | None
    dropped: tuple[tuple[str, str, str], ...]
    """(option, value, what to do) of what psjob has no word for."""
    by_accelerate: bool = False
    """`processes` are those of all nodes."""

    @property
    def script(self) -> str:
        """What it runs, in a word."""
        words = self.command[1:]
        module = words[:1] == ("-m",)
        return next(iter(words[1:] if module else words), self.command[0])


def is_launcher(words: Sequence[str]) -> bool:
    """Does this command begin with a launcher of torch or Accelerate, perhaps after assignments?"""
    rest = _without_assignments(words)[1]
    return _after_launcher(rest) is not None or _after_accelerate(rest) is not None


def quoted(word: str) -> list[str] | None:
    """The words of a launcher's command that was given as one word; None where it is none."""
    try:
        words = shlex.split(word) if len(word.split()) > 1 else []
    except ValueError:
        return None
    return words if words and is_launcher(words) else None


def taken_apart(words: Sequence[str]) -> Launch:
    """What the command `words` starts.

    Raises:
        BadInput: it is no launcher of torch, or one of its options cannot be read.
    """
    env, rest = _without_assignments(words)
    if (given_to := _after_accelerate(rest)) is not None:
        return _accelerated(given_to, env, rest)
    tail = _after_launcher(rest)
    if tail is None:
        first = rest[0].rpartition("/")[2] if rest else "nothing"
        why = f"; {OTHERS[first]}: write the command of one process as [python, train.py]" if first in OTHERS else ""
        raise BadInput(
            f"{shlex.join(rest)[:200] or 'an empty line'}: begins with {first}, not with torchrun, python -m torch.distributed.run or"
            f" accelerate launch{why}"
        )
    given = _parser().parse_args(tail)
    if not given.script:
        raise BadInput(f"{shlex.join(rest)[:200]}: names no script; write it as you start it, such as torchrun --nproc-per-node=4 train.py")
    python = "python3" if "python3" in rest[0] else "python"
    start = [] if given.no_python else [python, "-m"] if given.module else [python]
    values = {name: getattr(given, name.replace("-", "_")) for name in (*NUMBERS, *TEXTS, *FLAGS)}
    dropped = tuple(
        (f"--{name}", str(value), WHY.get(name, MEETING))
        for name, value in values.items()
        if value not in (None, False) and name not in MEANT
    )
    return Launch(
        (*start, *given.script),
        env,
        values["nnodes"],
        values["nproc-per-node"],
        None if values["max-restarts"] is None else _number("--max-restarts", values["max-restarts"]),
        dropped,
    )


def line_of_text(text: str) -> list[str] | None:
    """The words of the one launcher command in a script or a line of text; None where there is none.

    Raises:
        BadInput: there are several, or it holds words of the shell that psjob would have to run.
    """
    joined = re.sub(r"\\\s*\n", " ", text)
    found = []
    for line in joined.splitlines():
        if not re.search(
            r"(?:^|[\s/])(?:torchrun|accelerate\s+launch)(?:\s|$)|torch\.distributed\.(?:run|launch)(?:\s|$)", line
        ) or line.lstrip().startswith("#"):
            continue
        found.append(_words(line.strip()))
    if len(found) > 1:
        raise BadInput(f"the text holds {len(found)} torchrun commands, not one; give one of them: psjob convert torchrun … script.py")
    return found[0] if found else None


def _words(line: str) -> list[str]:
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words = list(lexer)
    except ValueError as error:
        raise BadInput(f"{line[:200]}: cannot be read ({error}); close its quotes") from None
    for i, word in enumerate(words):
        if word and set(word) <= set(";&|<>"):
            raise BadInput(f"{line[:200]}: holds {word!r}, a word of the shell; give only the torchrun command")
        if "$" in word and not re.search(r"\$\(\w+\)", word):
            raise BadInput(f"{line[:200]}: {words[i]!r} is a variable of the shell; write its value")
    return words[1:] if words[:1] == ["exec"] else words


def _without_assignments(words: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    rest = list(words[1:] if list(words[:1]) == ["env"] else words)
    env = []
    while rest and ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env.append((name, value))
    return tuple(env), rest


def _after_launcher(words: Sequence[str]) -> list[str] | None:
    """The launcher's own arguments; None where `words` begins with something else."""
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if program == "torchrun":
        return list(words[1:])
    if not program.startswith("python"):
        return None
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    return rest[2:] if rest[:1] == ["-m"] and rest[1:2] and rest[1] in MODULES else None


def _after_accelerate(words: Sequence[str]) -> list[str] | None:
    """The arguments of `accelerate launch`; None where `words` begins with something else."""
    program = words[0].rpartition("/")[2] if words else ""
    if program == "accelerate-launch":
        return list(words[1:])
    if program == "accelerate" and list(words[1:2]) == ["launch"]:
        return list(words[2:])
    as_module = program.startswith("python") and list(words[1:2]) == ["-m"]
    return list(words[3:]) if as_module and list(words[2:3]) == ["accelerate.commands.launch"] else None


def _accelerated(tail: Sequence[str], env: tuple[tuple[str, str], ...], line: Sequence[str]) -> Launch:
    """What `accelerate launch` would start: as many processes on all machines together as it says."""
    values, script = _accelerate_options(tail, shlex.join(line)[:200])
    if not script:
        raise BadInput(f"{shlex.join(line)[:200]}: names no script; write it as you start it, such as accelerate launch train.py")
    start = [] if "no_python" in values else ["python", "-m"] if "module" in values else ["python"]
    told = tuple((variable, values[name]) for name, variable in SET_BY.items() if name in values and values[name] != "no")
    dropped = [(f"--{name}", value, ACCELERATE_WHY.get(name, MEETING)) for name, value in values.items() if name in DROPPED_VALUES]
    if "config_file" in values:
        dropped.append(("--config_file", values["config_file"], ACCELERATE_WHY["config_file"]))
    if "num_processes" not in values:
        dropped.append(("--num_processes", "", "is not given, and depends on the machine; one worker is taken: set spec.workers.replicas"))
    restarts = _number("--max_restarts", values["max_restarts"], "accelerate launch") if "max_restarts" in values else None
    return Launch((*start, *script), (*env, *told), None, values.get("num_processes"), restarts, tuple(dropped), by_accelerate=True)


def _accelerate_options(tail: Sequence[str], line: str) -> tuple[dict[str, str], list[str]]:
    """Options by name, and the script with its arguments. Raises BadInput for one that is not known."""
    values: dict[str, str] = {}
    rest = list(tail)
    while rest and rest[0].startswith("-"):
        word, equals, value = rest.pop(0).partition("=")
        name = "module" if word == "-m" else word.lstrip("-").replace("-", "_")
        if name in TAKEN_FLAGS and not equals:
            values[name] = ""
        elif name in (*TAKEN_VALUES, *DROPPED_VALUES):
            if not equals and not rest:
                raise BadInput(f"{line}: {word} has no value; write the command as you start it")
            values[name] = value if equals else rest.pop(0)
        else:
            raise BadInput(f"{line}: {word} is an option that psjob cannot carry over; leave it out, and see docs/accelerate.md")
    return values, rest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"torchrun: {message}; write the command as you start it, such as torchrun --nproc-per-node=4 train.py")


def _parser() -> _Parser:
    """torchrun's own options: each may be written with '-' or '_'."""
    parser = _Parser(prog="torchrun", add_help=False, allow_abbrev=False)
    for name in (*NUMBERS, *TEXTS, *FLAGS):
        flag = name in FLAGS
        short = [f"-{letter}" for letter, of in SHORT.items() if of == name]
        names = dict.fromkeys([*short, f"--{name}", f"--{name.replace('-', '_')}"])
        if flag:
            parser.add_argument(*names, dest=name.replace("-", "_"), action="store_true")
        else:
            parser.add_argument(*names, dest=name.replace("-", "_"))
    parser.add_argument("script", nargs=argparse.REMAINDER)
    return parser


def _number(option: str, value: str, launcher: str = "torchrun") -> int:
    if not value.isascii() or not value.isdigit():
        raise BadInput(f"{launcher}: {option} {value}: must be a whole number")
    return int(value)
