"""Profiles a script's model in a process of its own, for `psjob plan-stages`: the interpreter that `psjob run` gives workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psjob_client.local import library
from psjob_client.local.command import base_environment
from psjob_client.local.errors import BadInput
from psjob_operator.printable import printable

KILL_SECONDS = 5.0
LONGEST = 400
"""Letters of what a script said last."""


def profile_script(script: str, args: Sequence[str], *, meta: bool, deadline: float) -> dict[str, Any]:
    """The profile of `train.py` (the model of its first training step) or of `train.py:build` (what that function returns), unchecked.

    Raises BadInput: no such file, a script that fails, has no such model, or takes more than `deadline` seconds.
    """
    path, function = _split(script, meta)
    library.must_be_installed("psjob plan-stages")
    with tempfile.TemporaryDirectory(prefix="psjob-profile-") as folder:
        out, said = Path(folder, "profile.json"), Path(folder, "said")
        request = {"script": str(path), "function": function, "args": [*args], "meta": meta, "room": _free(), "out": str(out)}
        argv = [sys.executable, "-m", "psjob.profiling", json.dumps(request)]
        with said.open("wb") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=base_environment(), start_new_session=True
            )
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                raise BadInput(
                    f"--deadline {deadline:g}: {script} had no training step within {deadline:g} s; give more, a smaller data set, "
                    f"or a function: {path.name}:build"
                ) from None
            finally:
                _end(process)
        if code == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_bytes())
            return found
        raise BadInput(_why(script, code, said.read_text(errors="replace")))


def _split(script: str, meta: bool) -> tuple[Path, str | None]:
    name, colon, function = script.rpartition(":")
    path = Path(name if colon else script)
    if colon and not function.isidentifier():
        raise BadInput(f"{script}: {function or 'nothing'} is no name of a function; write {name or 'train.py'}:build")
    if not path.is_file():
        raise BadInput(f"{path}: {'is a folder' if path.is_dir() else 'there is no such file'}; give the path of a training script")
    if meta and not colon:
        raise BadInput(
            f"--meta: {path.name} is run as it is and makes real weights; give a function that builds the model: {path.name}:build"
        )
    return path, function if colon else None


def _free() -> int | None:
    """Bytes of memory that are free here, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _why(script: str, code: int, said: str) -> str:
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    shown = printable(last, most=LONGEST)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    hint = "; that is often too little memory: use --meta and a function" if code == -9 else ""
    about = "" if shown.startswith(Path(script.partition(":")[0]).name) else f"{script}: "
    return f"{about}{shown or f'ended with {how} and said nothing'}{hint}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the processes that the script may have started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait(KILL_SECONDS)
