"""Which Python a shard runs: the one that the worker's command would start, with what that needs of the worker's environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psjob_operator.render.names import Document

PYTHON = re.compile(r"python[0-9.]*")
RUNNERS = frozenset({"uv", "conda", "mamba", "micromamba", "poetry", "pdm", "pipenv", "pixi"})
"""Programs whose `run` starts another one in an environment of theirs."""
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "composer", "ipython"})
"""Programs that a Python package installs beside the interpreter, and that run a script."""
WRAPPERS = frozenset({"env", "tini", "dumb-init"})
"""Programs that start the one after their options."""
VALUED = frozenset(
    {"-p", "--python", "--prefix", "-n", "--name", "--with", "--extra", "--group", "--package", "--project", "--directory", "--env-file"}
)
"""Options of runners whose value is the next word."""
INLINE = frozenset({"-s", "--script"})
"""uv makes an environment for that script alone, which nothing else can be started in."""
ENVIRONMENT = re.compile(r"conda|mamba|venv|/envs?/")
"""Folders of an environment, whose programs have their Python beside them."""
HOME_OF_ROOT = "/root"
VARIABLES = re.compile(
    r"PATH|HOME|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON[A-Z]*"
    r"|CONDA_(PREFIX(_\d+)?|DEFAULT_ENV|EXE|PYTHON_EXE|SHLVL|ROOT|ENVS_PATH|ENVS_DIRS|PKGS_DIRS|OFFLINE)|CONDARC|MAMBA_(EXE|ROOT_PREFIX)"
    r"|UV_(PROJECT|PROJECT_ENVIRONMENT|PYTHON|PYTHON_(INSTALL_DIR|PREFERENCE|DOWNLOADS|BIN_DIR)|SYSTEM_PYTHON|MANAGED_PYTHON|NO_MANAGED_PYTHON"
    r"|CACHE_DIR|NO_CACHE|NO_SYNC|FROZEN|LOCKED|OFFLINE|ISOLATED|NO_CONFIG|CONFIG_FILE|WORKING_DIRECTORY|LINK_MODE|NO_DEV|NO_PROGRESS|TOOL_DIR)"
)
"""What decides which Python starts and what it can import, by name: the runners' other variables may hold credentials of an index."""
DEFAULT = "python3"


@dataclass(frozen=True)
class Interpreter:
    """How a Python is started."""

    words: tuple[str, ...]
    """The program and its first arguments; those of Python follow."""

    @property
    def of_the_images_user(self) -> bool:
        """Only the user whom the image names can start it: it lies in root's home, or a runner writes into files of its own."""
        return self.writes or any(_within(word, HOME_OF_ROOT) for word in self.words)

    @property
    def writes(self) -> bool:
        """It is started by a runner, which writes into the image: locks, caches, an environment."""
        return _base(self.words[0]) in RUNNERS


def interpreter(command: Sequence[Any]) -> Interpreter:
    """The Python of the worker's `command`; the first `python3` on the PATH where it begins with none that can be told from outside."""
    words = [str(word) for word in command]
    while words and _base(words[0]) in WRAPPERS:
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[1:]
    if not words:
        return Interpreter((DEFAULT,))
    if PYTHON.fullmatch(_base(words[0])):
        return Interpreter((words[0],))
    if _base(words[0]) in RUNNERS and "run" in words:
        return Interpreter(_run(words, words.index("run") + 1) or (DEFAULT,))
    folder = words[0].rpartition("/")[0]
    beside = folder.endswith("/bin") and ENVIRONMENT.search(folder)
    return Interpreter((f"{folder}/python",) if beside else (DEFAULT,))


def variables(trained: Document) -> list[Document]:
    """Those variables of the worker that its Python is found by, and whom they refer to as `$(NAME)`; literal values alone."""
    given = {item.get("name"): item for item in trained.get("env") or [] if isinstance(item.get("value"), str)}
    wanted = {name for name in given if VARIABLES.fullmatch(str(name))}
    todo = list(wanted)
    while todo:
        referred = {name for name in re.findall(r"\$\(([^()]+)\)", given[todo.pop()]["value"]) if name in given}
        todo += sorted(referred - wanted)
        wanted |= referred
    return [{"name": name, "value": item["value"]} for name, item in given.items() if name in wanted]


def folder(trained: Document) -> str | None:
    """Where the worker starts, if that lies in its image: a shard mounts none of the worker's volumes."""
    there = trained.get("workingDir")
    mounts = [str(mount.get("mountPath")) for mount in trained.get("volumeMounts") or []]
    inside = there and any(_within(str(there), mount) for mount in mounts)
    return str(there) if there and not inside else None


def _run(words: Sequence[str], at: int) -> tuple[str, ...] | None:
    """What a runner is told up to its program, and Python in the place of that; None where no Python runs there."""
    while at < len(words):
        word = words[at]
        if word in INLINE:
            return None
        if word in VALUED:
            at += 2
            continue
        if PYTHON.fullmatch(_base(word)):
            return (*words[: at + 1],)
        if word in ("-m", "--module") or word.endswith(".py") or _base(word) in LAUNCHERS:
            return (*words[:at], "python")
        at += 1
    return None


def _within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _base(word: str) -> str:
    return word.rpartition("/")[2]
