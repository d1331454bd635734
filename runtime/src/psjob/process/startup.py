"""What a worker does before the first line of its script, and how its process began, for a script that starts again in place.

- torch wraps methods of its optimizers so that its compiler leaves them alone. The first call of one imports the whole compiler, which
  takes about as long as importing torch. `spare_the_compiler` calls such methods directly while the compiler is not loaded.
- `DistributedSampler(dataset)`, as DDP scripts have it, asks a process group for its rank and number of replicas, which a job has not.
  `samplers_know_the_job` gives it the job's. If there is a group, or the script names both, nothing changes.
- A script computes with what a library says of all processes long before it attaches. `begin_with_libraries` lets the module of psjob
  that knows a library begin as soon as the script imports that library. No library is imported here.

An agent imports this module too, so it imports no torch by itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from psjob import contract

FOLDER = os.getcwd()
ENVIRONMENT = dict(os.environ)
"""As this process began: noted when psjob is imported, before anything changes them."""
COMPILER: Final = "torch._dynamo"
HOMES: Final = {"accelerate": "psjob.integrations.accelerate", "lightning": "psjob.integrations.fabric"}
"""By package of a library, the module of psjob that knows it. Such a module has `begin_worker()`."""


def begin_worker(environ: MutableMapping[str, str]) -> None:
    """If that environment says that this process is a worker's and trains."""
    agent = contract.ENV_PROCESSES in environ and contract.ENV_LOCAL not in environ  # it starts those that train, and imports no torch
    if environ.get(contract.ENV_ROLE) != "worker" or agent:
        return
    from psjob.process import errors, own_files

    if environ.get(contract.ENV_INDEX) == "0" and environ.get(contract.ENV_LOCAL, "0") == "0":
        one_run(environ.get(contract.ENV_RUN, ""), environ)
    spare_the_compiler()
    samplers_know_the_job()
    own_files.note_reads(environ)
    errors.end_at_second_refusal()
    errors.shorten_errors()
    errors.add_hints()
    begin_with_libraries()


def one_run(run: str, environ: MutableMapping[str, str]) -> None:
    """Let a worker that starts again continue in its W&B run. One that the script names itself is left."""
    if "WANDB_RUN_ID" not in environ:
        environ["WANDB_RUN_ID"] = run
        environ.setdefault("WANDB_RESUME", "allow")


def spare_the_compiler() -> None:
    """Call such methods directly until something else loads the compiler; from then on they are as torch made them."""
    import torch

    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        code = getattr(method, "__code__", None)
        if plain is not None and code is not None and code.co_filename.endswith("_compile.py") and not hasattr(plain, MARK):
            setattr(plain, MARK, _direct(plain))


MARK = "__dynamo_disable"
"""If torch keeps the compiler's form of a method, once it has one."""


def _direct(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules and getattr(plain, MARK, None) is call:
            delattr(plain, MARK)
            from torch._compile import _disable_dynamo

            return _disable_dynamo(plain)(*args, **kwargs)
        return plain(*args, **kwargs)

    return call


def samplers_know_the_job() -> None:
    """Let samplers that are made from now on know it."""
    from torch.utils.data import DistributedSampler

    made = DistributedSampler.__init__
    if not hasattr(made, "__wrapped__"):  # a fork of a process that has
        DistributedSampler.__init__ = _knowing(made)  # type: ignore[method-assign]


def _knowing(made: Any) -> Any:
    from psjob.process import config

    @functools.wraps(made)
    def init(self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *given: Any, **named: Any) -> None:
        if (num_replicas is None or rank is None) and not _has_group() and (place := config.place()) is not None:
            # All workers of a job of stages work on each batch.
            world, own = (1, 0) if place.config.stages else (place.world, place.rank)
            num_replicas, rank = world if num_replicas is None else num_replicas, own if rank is None else rank
        made(self, dataset, num_replicas, rank, *given, **named)

    return init


def _has_group() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def begin_with_libraries() -> None:
    """From now on; for libraries that are imported already, now."""
    for name in HOMES:
        if name in sys.modules:
            _begin(name)
    if not any(isinstance(finder, ImportWatch) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportWatch())


class ImportWatch:
    """A finder of modules that finds nothing by itself: it lets what others find begin."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of a library in HOMES what the other finders say; None of all else."""
        if name not in HOMES or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            _after(spec.loader, name)
        return spec


def _after(loader: Any, name: str) -> None:
    """Let psjob's module begin when this loader has run the library's."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        _begin(name)

    loader.exec_module = exec_module


def _begin(name: str) -> None:
    importlib.import_module(HOMES[name]).begin()


def integration_of(thing: object) -> Any | None:
    """The module of psjob that knows objects of this type; None for those of torch."""
    return _imported(type(thing).__module__.partition(".")[0])


def integrations_in_use() -> list[Any]:
    """The modules of psjob for all libraries that the script has imported."""
    return [known for library in HOMES if library in sys.modules and (known := _imported(library)) is not None]


def _imported(library: str) -> Any | None:
    return importlib.import_module(HOMES[library]) if library in HOMES else None
