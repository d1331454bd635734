"""The manifest of a training that was asked for from Python: the same one for this machine and for a cluster.

A function or a script travels in it as text, never pickled: what travels can be read there. A function takes along what it names of modules
(`import torch`, `from torch import nn`); everything else it names must be its own.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import re
import secrets
import symtable
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from psjob_client.jobs.verbs import checked_job
from psjob_client.local.manifest import as_written, read_job
from psjob_client.problems import BadInput, BadManifest, JobProblem
from psjob_operator.contract import GROUP, KIND, VERSION

IMAGE = "pytorch/pytorch:2.15.0-cuda13.2-cudnn9-runtime"
"""Has Python and torch, which is all that a worker needs; psjob puts its own library in.
Its torch is the one that requirements/runtime.txt pins."""
GPU = "nvidia.com/gpu"
LONGEST_NAME = 40
END = "--"
"""Of packages, in the words of boot.py: the script's own arguments follow."""
Train = Callable[..., Any] | str | Path | Sequence[str]
LARGEST = 100 * 1024
"""Bytes of a script: Linux takes 128 KiB as one word of a command."""
OWN = ("__name__", "__file__", "__doc__")
"""Names that every script has."""
REMEDY = "define it inside the function, hand it over with args={…}, or put the code into a file and train that"


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
        "metadata": {"name": name or training_name(what, unique=unique)},
        "spec": {
            "training": {"mode": mode},
            "shards": {"replicas": shards},
            "workers": {"replicas": workers, "template": {"spec": {"containers": [container]}}},
        },
    }
    return checked(_laid(made, {"spec": dict(spec or {})}))


def checked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, if it is valid. Raises BadManifest with every problem."""
    checked_job(manifest)
    return dict(manifest)


def read_manifest_file(path: str | Path) -> dict[str, Any]:
    """The manifest in a file. Raises BadManifest with every problem."""
    try:
        return as_written(read_job(Path(path)))
    except BadInput as error:
        raise BadManifest(str(error)) from None


def training_name(what: Train, *, unique: bool = True) -> str:
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


class CannotShip(JobProblem):
    """A function that cannot run elsewhere as it is."""


def script_of(what: Callable[..., Any] | str | Path, args: Mapping[str, Any] | None = None) -> str:
    """The text of a script that does what `what` does: calls the function with `args`, or is the file.

    Raises:
        CannotShip: a lambda, a closure, a method; a function that needs names which are not its own; a file that is not there.
    """
    text = _file(what, args) if isinstance(what, str | Path) else _function(what, args or {})
    size = len(text.encode())
    if size > LARGEST:
        raise CannotShip(
            f"the script has {size} bytes, at most {LARGEST} travel in a manifest; put it into the image, and train its command"
        )
    return text


def imported_beside(path: Path) -> list[str]:
    """Names of files and folders beside a script that it imports. They do not travel with it.

    Raises:
        CannotShip: it is no Python.
    """
    try:
        tree = ast.parse(script_of(path))
    except SyntaxError as error:
        raise CannotShip(f"{path}: line {error.lineno or 1} is no Python: {error.msg}; correct it, and try `python {path}` first") from None
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update([(node.module or "").partition(".")[0]] if not node.level else [node.module or alias.name for alias in node.names])
    folder = path.absolute().parent
    places = [folder / form for name in sorted(names) if name for form in (f"{name}.py", name)]
    return [place.name for place in places if place.is_file() or (place.is_dir() and any(place.rglob("*.py")))]


def _file(path: str | Path, args: Mapping[str, Any] | None) -> str:
    if args:
        raise CannotShip(f"args: are for a function; {path} is a file: read environment variables there, given with env={{…}}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CannotShip(f"{path}: cannot be read: {why}; name a Python file, or give a command of the image as a list") from None


def _function(function: Callable[..., Any], args: Mapping[str, Any]) -> str:
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, FunctionType):
        raise CannotShip(f"{name} is no plain function; give a function that is written with `def`, a file, or a command as a list")
    if function.__name__ == "<lambda>":
        raise CannotShip("a lambda cannot be trained: its source is no statement; write it with `def`")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise CannotShip(f"{name} is a coroutine or generator, which runs nothing when it is called; give a plain function")
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise CannotShip(f"{name} uses {names} of the function around it, which stays here; {REMEDY}")
    source = _source(function)
    imports, foreign = _names(function, source)
    if foreign:
        raise CannotShip(f"{name} needs {', '.join(foreign)}, which stays here; {REMEDY}")
    call = _call(function, args)
    parts = [f'"""The function {function.__name__}, as psjob.Client.train sends it."""\n', *imports, "", "", source.rstrip(), "", ""]
    return "\n".join([*parts, 'if __name__ == "__main__":', *(f"    {line}".rstrip() for line in call), ""])


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise CannotShip(
            f"the source of {function.__name__} is not known, as of one typed at Python's own prompt; put it into a file or a notebook"
        ) from None


def _call(function: FunctionType, args: Mapping[str, Any]) -> list[str]:
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise CannotShip(f"args: do not fit {function.__name__}{inspect.signature(function)}: {error}; give them by name") from None
    if not args:
        return [f"{function.__name__}()"]
    try:
        text = json.dumps(dict(args), allow_nan=False)
        if json.loads(text) != dict(args):
            raise ValueError("a value comes back as another one")
    except (TypeError, ValueError) as error:
        raise CannotShip(f"args: must be JSON: {error}; give numbers, texts, lists and objects with text keys") from None
    return ["import json", "", f"{function.__name__}(**json.loads({text!r}))"]


def _names(function: FunctionType, source: str) -> tuple[list[str], list[str]]:
    """Import lines for the names that are modules or lie in them, and the names that are neither."""
    try:
        table = symtable.symtable(source, function.__name__, "exec")
    except SyntaxError:
        raise CannotShip(f"the source of {function.__name__} cannot stand by itself; write it with `def`, on lines of its own") from None
    imports: list[str] = []
    foreign: list[str] = []
    for name in sorted(_globals(table) - {function.__name__, *OWN}):
        if name in function.__globals__:
            line = _import(name, function.__globals__[name], function.__module__)
            (foreign if line is None else imports).append(line or name)
        elif not hasattr(builtins, name):
            foreign.append(name)
    return imports, foreign


def _globals(table: symtable.SymbolTable) -> set[str]:
    top = table.get_type() == "module"
    found = {one.get_name() for one in table.get_symbols() if one.is_referenced() and (top or one.is_global())}
    return found.union(*(_globals(child) for child in table.get_children()))


def _import(name: str, value: Any, own_module: str) -> str | None:
    if isinstance(value, ModuleType):
        parent, _, last = value.__name__.rpartition(".")
        if value.__name__ in ("__main__", own_module):
            return None
        if name == value.__name__:
            return f"import {name}"
        return f"from {parent} import {last}" if last == name and parent else f"import {value.__name__} as {name}"
    home = getattr(value, "__module__", None)
    # What lies beside the function is not imported: its file is the one that starts the training.
    if not isinstance(home, str) or home in ("__main__", own_module) or home not in sys.modules:
        return None
    own = getattr(value, "__name__", name)
    if not isinstance(own, str) or getattr(importlib.import_module(home), own, None) is not value:
        return None
    public = home.partition("._")[0]  # pathlib, of the pathlib._local that Python 3.13 has
    if getattr(sys.modules.get(public), own, None) is value:
        home = public
    return f"from {home} import {own}" if own == name else f"from {home} import {own} as {name}"
