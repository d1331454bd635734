"""The manifest of a training that was asked for from Python: the same one for this machine and for a cluster."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from psjob_client.local.manifest import as_written, read_job
from psjob_client.problems import BadInput, JobProblem
from psjob_client.sdk.shipping import script_of
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.validate import every_problem
from psjob_operator.contract import GROUP, KIND, VERSION

IMAGE = "pytorch/pytorch:2.15.0-cuda13.2-cudnn9-runtime"
"""Has Python and torch, which is all that a worker needs; psjob puts its own library in.
Its torch is the one that requirements/runtime.txt pins."""
GPU = "nvidia.com/gpu"
LONGEST_NAME = 40
END = "--"
"""Of packages, in the words of boot.py: the script's own arguments follow."""
Train = Callable[..., Any] | str | Path | Sequence[str]


class BadManifest(JobProblem):
    """The manifest that was asked for is not valid; a line a problem."""

    __module__ = "psjob"


def build(
    what: Train,
    *,
    args: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    name: str | None = None,
    workers: int = 2,
    shards: int = 1,
    mode: str = "sync",
    image: str | None = None,
    resources: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    spec: Mapping[str, Any] | None = None,
    unique: bool = True,
) -> dict[str, Any]:
    """A valid PSTrainingJob; its arguments are those of `Client.train`.

    `arguments` are words for a file. `unique`: a name that is made is no other job's.

    Raises:
        CannotShip: a function or file that cannot travel.
        BadManifest: a value that no manifest may have; the text names the field.
    """
    container: dict[str, Any] = {"name": "worker", "image": image or IMAGE, **_command(what, args, packages, arguments)}
    if env:
        container["env"] = [{"name": str(key), "value": str(value)} for key, value in env.items()]
    if resources:
        limits = {GPU if key == "gpu" else str(key): str(value) for key, value in resources.items()}
        container["resources"] = {"limits": limits, "requests": dict(limits)}
    made: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name or named(what, unique=unique)},
        "spec": {
            "training": {"mode": mode},
            "ps": {"shards": shards},
            "workers": {"replicas": workers, "template": {"spec": {"containers": [container]}}},
        },
    }
    return checked(_laid(made, {"spec": dict(spec or {})}))


def checked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, if it is valid. Raises BadManifest with every problem."""
    job_of(manifest)
    return dict(manifest)


def read(path: str | Path) -> dict[str, Any]:
    """The manifest in a file. Raises BadManifest with every problem."""
    try:
        return as_written(read_job(Path(path)))
    except BadInput as error:
        raise BadManifest(str(error)) from None


def job_of(manifest: Mapping[str, Any]) -> PSTrainingJob:
    """The manifest, read. Raises BadManifest with every problem."""
    job, problems = every_problem(dict(manifest))
    if job is None:
        raise BadManifest("\n".join(str(problem) for problem in problems))
    return job


def named(what: Train, *, unique: bool = True) -> str:
    """A name for a training: `train`, or `train-3fa2`, which is its own."""
    if isinstance(what, str | Path):
        base = Path(what).stem
    elif callable(what):
        base = getattr(what, "__name__", "train")
    else:
        base = next((Path(word).stem for word in what if word.endswith(".py")), "train")
    clean = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")
    clean = clean if clean[:1].isalpha() else f"job-{clean}".rstrip("-")
    clean = clean[: LONGEST_NAME - 5].rstrip("-")
    return f"{clean}-{secrets.token_hex(2)}" if unique else clean


def _command(what: Train, args: Mapping[str, Any] | None, packages: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    if isinstance(packages, str):
        raise BadManifest(f"packages: {packages!r} is one text; give a list, such as [{packages!r}]")
    if not isinstance(what, str | Path) and not callable(what):
        if packages or args:
            raise BadManifest("packages and args go with a function or a file; what a command needs is in its image and in its own words")
        return {"command": [str(word) for word in what]}
    words = [script_of(what, args), *packages, *([END, *arguments] if arguments else [])]
    # Kubernetes would put a variable's value where a script has $(NAME); a doubled $ stands for one.
    return {"command": ["python", "-c", boot()], "args": [word.replace("$", "$$") for word in words]}


@cache
def boot() -> str:
    """The text that makes a file of a script and runs it (boot.py), without its comments for developers."""
    return Path(__file__).with_name("boot.py").read_text(encoding="utf-8").replace("$", "$$")


def _laid(under: Any, over: Any) -> Any:
    """`over` laid over `under`: objects are merged, everything else is replaced."""
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    return {**under, **{key: _laid(under[key], value) if key in under else value for key, value in over.items()}}
