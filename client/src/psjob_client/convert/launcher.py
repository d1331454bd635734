"""Takes a launcher's command line apart: torchrun, or torch.distributed.run and launch as modules."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from psjob_client.local.errors import BadInput

MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run"})
OTHERS = {
    "accelerate": "psjob starts the processes that `accelerate launch` would start",
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

    @property
    def script(self) -> str:
        """What it runs, in a word."""
        words = self.command[1:]
        module = words[:1] == ("-m",)
        return next(iter(words[1:] if module else words), self.command[0])


def is_launcher(words: Sequence[str]) -> bool:
    """Does this command begin with a launcher of torch, perhaps after assignments?"""
    return _after_launcher(_without_assignments(words)[1]) is not None


def taken_apart(words: Sequence[str]) -> Launch:
    """What the command `words` starts.

    Raises:
        BadInput: it is no launcher of torch, or one of its options cannot be read.
    """
    env, rest = _without_assignments(words)
    tail = _after_launcher(rest)
    if tail is None:
        first = rest[0].rpartition("/")[2] if rest else "nothing"
        why = f"; {OTHERS[first]}: write the command of one process as [python, train.py]" if first in OTHERS else ""
        raise BadInput(
            f"{shlex.join(rest)[:200] or 'an empty line'}: begins with {first}, not with torchrun or python -m torch.distributed.run{why}"
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
        if not re.search(r"(?:^|[\s/])torchrun(?:\s|$)|torch\.distributed\.(?:run|launch)(?:\s|$)", line) or line.lstrip().startswith("#"):
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
            raise BadInput(f"{line[:200]}: holds {word!r}, a word of the shell; give the torchrun command alone")
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


def _number(option: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise BadInput(f"torchrun: {option} {value}: must be a whole number")
    return int(value)
