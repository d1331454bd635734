"""What a worker does before the first line of its script. It makes the start cheaper: what a restart costs is mostly imports.

torch wraps methods of its optimizers so that its compiler leaves them alone. The first call of one imports the whole
compiler, which takes about as long as importing torch. Where the compiler is not loaded there is nothing to leave alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from psjob import contract

COMPILER = "torch._dynamo"


def begin(environ: MutableMapping[str, str]) -> None:
    """If that environment says that this process is a worker's and trains."""
    agent = contract.ENV_PROCESSES in environ and contract.ENV_LOCAL not in environ  # it starts those that train, and imports no torch
    if environ.get(contract.ENV_ROLE) != "worker" or agent:
        return
    from psjob.process import began, errors, leftin, onimport, ownfiles, samplers, shown  # noqa: F401 - before anything changes the environment

    if environ.get(contract.ENV_INDEX) == "0" and environ.get(contract.ENV_LOCAL, "0") == "0":
        one_run(environ.get(contract.ENV_RUN, ""), environ)
    spare_the_compiler()
    samplers.know_the_job()
    ownfiles.begin(environ)
    errors.begin()
    shown.install()
    leftin.begin()
    onimport.begin()


def one_run(run: str, environ: MutableMapping[str, str]) -> None:
    """Let a worker that starts again go on in its W&B run. One that the script names itself is left."""
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
"""Where torch keeps the compiler's form of a method, once it has one."""


def _direct(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules and getattr(plain, MARK, None) is call:
            delattr(plain, MARK)
            from torch._compile import _disable_dynamo

            return _disable_dynamo(plain)(*args, **kwargs)
        return plain(*args, **kwargs)

    return call
